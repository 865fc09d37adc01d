"""Many processes decode as one does, and survive what one would not."""

import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ict.data.workers as workers
from ict.data.decode import Target
from ict.data.decoding import decode_chunk
from ict.data.pile import Entry
from ict.data.workers import decode_all

TARGET = Target(size=8, channels=3, fit="crop", background=255)


def entries(count: int) -> list[Entry]:
    found = []
    for i in range(count):
        buffer = io.BytesIO()
        Image.new("RGB", (9, 9), (i % 256, i // 256, 7)).save(buffer, "PNG")
        content = b"text" if i % 50 == 3 else buffer.getvalue()
        found.append(Entry(f"{i}.png", "", len(content), None, f"class {i % 4}", content))
    return found


def gathered(chunks) -> tuple[list, bytes]:
    chunks = list(chunks)
    return [outcome for outcomes, _ in chunks for outcome in outcomes], b"".join(pixels for _, pixels in chunks)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 700])
def test_processes_give_what_one_loop_gives(count):
    images = entries(count)
    assert gathered(decode_all(iter(images), TARGET)) == decode_chunk(images, TARGET)


def test_arrays_that_fit_and_arrays_that_do_not():
    images = [Entry(str(i), "", 0, None, "", np.full((8, 8, 3), i % 256, np.uint8)) for i in range(200)]
    images += [Entry(str(i), "", 0, None, "", np.full((16, 9), i % 256, np.uint8)) for i in range(200)]
    assert gathered(decode_all(iter(images), TARGET)) == decode_chunk(images, TARGET)


HARMFUL = """
    import os, time
    import ict.data.decode as decode
    original = decode.decode_planes
    def harmful(data, target):
        if data == b"crash":
            os.kill(os.getpid(), 11)
        if data == b"leave":
            os._exit(3)
        if data == b"stall":
            time.sleep(1000)
        if data == b"print":
            print("hello " * 20)
            os.write(1, b"nonsense")
        return original(data, target)
    decode.decode_planes = harmful
"""


def test_an_image_that_kills_or_stalls_the_decoder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(HARMFUL))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(workers.__file__).parents[2]}")
    monkeypatch.setattr(workers, "PATIENCE", 0.2)
    images = entries(300)
    for place, content in {10: b"crash", 100: b"leave", 101: b"stall", 250: b"crash", 251: b"print"}.items():
        images[place] = Entry(f"{place}.png", "", 5, None, "", content)
    outcomes, pixels = gathered(decode_all(iter(images), TARGET))
    reasons = {entry.name: reason for entry, reason, _ in outcomes if reason is not None}
    assert [entry.name for entry, _, _ in outcomes] == [entry.name for entry in images]
    assert "crashed on it (SIGSEGV)" in reasons["10.png"] and "SIGSEGV" in reasons["250.png"]
    assert "exit code 3" in reasons["100.png"] and "takes longer" in reasons["101.png"]
    assert "not an image" in reasons["251.png"]
    assert len(pixels) == (300 - len(reasons)) * 3 * 8 * 8 and len(reasons) == 5 + 6


def test_a_script_without_a_main_guard_may_prepare_images(tmp_path):
    """`multiprocessing` would start such a script again and again."""
    for i in range(200):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / f"{i:03d}.png")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        from ict.config import DataConfig
        from ict.data import load_images
        print("begun")
        print(len(load_images(DataConfig(source={str(tmp_path)!r}, image_size=8, channels=3))))
    """)
    )
    environment = os.environ | {"ICT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.split() == ["begun", "200"], done.stderr


def test_decoding_processes_load_neither_torch_nor_numpy():
    program = "import sys, ict.data.decoding; print('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"


def test_giving_up_half_way_leaves_no_process_behind():
    chunks = decode_all(iter(entries(2000)), TARGET)
    next(chunks)
    before = children()
    chunks.close()
    assert len(before) >= 1 and children() == []


def children() -> list[str]:
    """Processes of ours that decode."""
    below = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in below]
    return [command for command in commands if "ict.data.decoding" in command]
