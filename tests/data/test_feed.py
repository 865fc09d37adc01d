"""A streamed set gives the batches that a resident one gives, whatever the order of asking."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from helpers import tiny_config

from ict.data import Images, batch_indices
from ict.data.feed import Resident, Stream, open_feed
from ict.data.images import PixelFile
from ict.files import DamagedFile
from ict.training.budget import Budget
from ict.training.loop import new_state, train

CPU = torch.device("cpu")


def mapped_images(path, count: int = 50) -> Images:
    pixels = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    path.write_bytes(pixels.numpy().tobytes())
    file = PixelFile(path, (count, 3, 8, 8))
    assert torch.equal(file.pixels(), pixels)
    return Images(pixels=file.pixels(), labels=torch.arange(count) % 7, class_names=tuple("abcdefg"), file=file)


def order(step: int) -> torch.Tensor:
    return batch_indices(step, batch=16, count=50, seed=1)


@pytest.mark.parametrize("steps", [[0, 1, 2, 3, 4], [7, 8, 3, 4, 4, 4, 100, 99, 0], [5]])
def test_streamed_and_resident_batches_are_the_same(steps, tmp_path):
    images = mapped_images(tmp_path / "pixels")
    stream, resident = Stream(images, order, CPU), Resident(images, order, CPU)
    for step in steps:
        ours, theirs = stream.take(step), resident.take(step)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[0], images.pixels[order(step)])
    stream.close()


def test_another_order_begins_with_the_next_batch(tmp_path):
    """Those that were gathered ahead are of the order before."""
    images = mapped_images(tmp_path / "pixels")
    for kind in (Stream, Resident):
        feed = kind(images, order, CPU)
        for step in range(3):
            feed.take(step)
        feed.reorder(lambda step: order(step).flip(0))
        for step in (3, 4, 0):
            pixels, labels = feed.take(step)
            assert torch.equal(pixels, images.pixels[order(step).flip(0)])
            assert torch.equal(labels, images.labels[order(step).flip(0)])
        feed.close()


def test_a_batch_is_not_overwritten_while_it_is_used(tmp_path):
    images = mapped_images(tmp_path / "pixels")
    stream = Stream(images, order, CPU)
    taken = [stream.take(step)[0] for step in range(20)]
    for step, batch in enumerate(taken):
        assert torch.equal(batch, images.pixels[order(step)])
    stream.close()


def test_the_kind_is_chosen_by_where_the_pixels_are(tmp_path):
    images = mapped_images(tmp_path / "pixels")
    in_memory = Images(pixels=images.pixels.clone(), labels=images.labels, class_names=images.class_names)
    kinds = [
        type(open_feed(one, order, CPU, kind=kind))
        for one in (images, in_memory)
        for kind in ("auto", "resident", "stream")
    ]
    assert kinds == [Stream, Resident, Stream, Resident, Resident, Stream]


def test_an_error_while_gathering_reaches_the_loop(tmp_path):
    images = mapped_images(tmp_path / "pixels")
    stream = Stream(images, lambda step: torch.tensor([10**6]), CPU)
    with pytest.raises((IndexError, RuntimeError), match="index"):
        stream.take(0)
    stream.close()


def test_a_file_that_becomes_shorter_is_an_error_not_a_crash(tmp_path):
    images = mapped_images(tmp_path / "pixels")
    os.truncate(tmp_path / "pixels", 1000)
    stream = Stream(images, order, CPU)
    with pytest.raises(DamagedFile, match="shorter"):
        stream.take(0)
    stream.close()


def test_training_is_the_same_to_the_bit_streamed_or_resident(tmp_path):
    from ict.data import load_images
    from ict.model import ModelSpec, build_model

    weights = []
    for kind in ("resident", "stream"):
        config = tiny_config(data={"feed": kind}, training={"steps": 6, "accumulate": 2})
        images = load_images(config.data)
        spec = ModelSpec.from_config(config, images.class_names)
        state = new_state(config, build_model(spec, seed=0))
        for _ in train(config, state, images, Budget(steps=6)):
            pass
        weights.append(torch.cat([p.detach().flatten() for p in state.model.parameters()]))
    assert torch.equal(*weights)


def test_the_loop_lets_go_of_its_thread(tmp_path):
    import threading

    from ict.data import load_images
    from ict.model import ModelSpec, build_model

    config = tiny_config(data={"feed": "stream"})
    images = load_images(config.data)
    run = train(
        config,
        new_state(config, build_model(ModelSpec.from_config(config, images.class_names))),
        images,
        Budget(steps=6),
    )
    next(run)
    assert any("ict-feed" in thread.name for thread in threading.enumerate())
    run.close()
    assert not any("ict-feed" in thread.name for thread in threading.enumerate())


@pytest.mark.slow
def test_a_hundred_thousand_images_in_half_a_gigabyte(tmp_path):
    """Preparing 100,000 images of 64×64 and streaming two epochs of them: 1.2 GB of pixels, never in memory at once."""
    program = textwrap.dedent(f"""
        import io, os, resource, tarfile, threading, time
        import numpy as np
        from PIL import Image
        rng = np.random.default_rng(0)
        pictures = []
        for _ in range(50):
            small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            buffer = io.BytesIO()
            small.resize((64, 64)).save(buffer, "JPEG")
            pictures.append(buffer.getvalue())
        with tarfile.open({str(tmp_path / "pile.tar")!r}, "w") as archive:
            for i in range(100_000):
                member = tarfile.TarInfo(f"{{i % 10}}/{{i:06d}}.jpg")
                member.size = len(pictures[i % 50])
                archive.addfile(member, io.BytesIO(pictures[i % 50]))
        os.environ["ICT_CACHE"] = {str(tmp_path / "cache")!r}
        import torch
        from ict.config import DataConfig
        from ict.data import batch_indices, load_images
        from ict.data.feed import open_feed

        def command(pid):
            with open(f"/proc/{{pid}}/cmdline", "rb") as file:
                return file.read()

        def resident(pid):
            try:
                if int(pid) != os.getpid() and command(pid) == command("self"):
                    return 0  # it still shares all memory with its parent, and is about to become another program
                with open(f"/proc/{{pid}}/statm") as file:
                    return int(file.read().split()[1]) * 4096
            except (FileNotFoundError, ProcessLookupError):
                return 0

        def family():
            below = set()
            for task in os.listdir("/proc/self/task"):
                try:
                    with open(f"/proc/self/task/{{task}}/children") as file:
                        below |= set(file.read().split())
                except FileNotFoundError:  # a thread that has just ended
                    pass
            return resident(os.getpid()) + sum(map(resident, below))

        peak, over = 0, False
        def watch():
            global peak
            while not over:
                peak = max(peak, family())
                time.sleep(0.02)
        watcher = threading.Thread(target=watch)
        watcher.start()
        images = load_images(DataConfig(source={str(tmp_path / "pile.tar")!r}, image_size=64, channels=3))
        prepared = peak
        peak = 0
        feed = open_feed(images, lambda s: batch_indices(s, batch=512, count=len(images), seed=0), torch.device("cpu"))
        total = sum(int(feed.take(step)[0].sum(dtype=torch.int64)) for step in range(2 * 100_000 // 512))
        feed.close()
        over = True
        watcher.join()
        print(len(images), images.pixels.nbytes, prepared, peak)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    count, size, prepared, streamed = map(int, done.stdout.split())
    print(f"all processes: {prepared / 1e6:.0f} MB while preparing, {streamed / 1e6:.0f} MB while streaming")
    assert count == 100_000 and size > 1.2e9
    assert 100e6 < prepared < 500e6 and 100e6 < streamed < 500e6
