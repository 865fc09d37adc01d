import io
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_config
from rich.console import Console

from ict.data import load_images
from ict.evaluation.chart import Chart
from ict.evaluation.report import nearest, real_images
from ict.experiment import run
from ict.pictures import comfortable_scale, grid


class Outline(HTMLParser):
    """Tags that must close, and everything that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.fetched, self.text = [], [], ""

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img", "line", "path", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("classes", [0, 10])
def test_the_page_is_whole_and_fetches_nothing(classes, tmp_path):
    config = tiny_config(data={"classes": classes})
    config = type(config)(**{**vars(config), "about": "<b>1 < 2 & $more</b>"})
    run(config, tmp_path / "run", device="cpu", console=Console(file=io.StringIO()))
    page = (tmp_path / "run" / "report.html").read_text()
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert outline.fetched and all(value.startswith("data:image/png;base64,") for value in outline.fetched)
    assert "url(" not in page and "<script" not in page
    assert "<b>1 < 2 & $more</b>" in outline.text  # escaped in the page
    for title in ("Real images", "One step", "Two steps", "Are they copies?", "How it learned", "Loss", "Recipe"):
        assert title in outline.text
    assert len(outline.fetched) == 4 + 2  # real, one, two, nearest; two snapshots
    assert ("Each column is one class" in page) == bool(classes)
    assert not re.search(r"\$[a-z{]", outline.text.replace("$more", ""))  # no placeholder left


def test_nearest_finds_a_copy():
    images = load_images(tiny_config().data)
    indices, distances = nearest(images.pixels[[5, 77]], images)
    assert indices.tolist() == [5, 77] and distances.tolist() == pytest.approx([0, 0], abs=1e-3)


def test_nearest_is_the_same_in_blocks(monkeypatch):
    """The set is never held as floats: ImageNet would take 63 GB at the end of a run of weeks."""
    images = load_images(tiny_config().data)
    samples = 255 - images.pixels[:20]
    whole = nearest(samples, images)
    monkeypatch.setattr("ict.evaluation.report.BLOCK", 100)
    assert all(torch.equal(a, b) for a, b in zip(nearest(samples, images), whole, strict=True))


def test_the_page_survives_a_class_without_images():
    images = load_images(tiny_config().data)
    kept = images.labels != 3
    images = type(images)(pixels=images.pixels[kept], labels=images.labels[kept], class_names=images.class_names)
    generator = SimpleNamespace(spec=SimpleNamespace(class_names=images.class_names))
    assert len(real_images(generator, images)) == 80


def test_a_sheet_keeps_pixels_and_order():
    images = torch.arange(6, dtype=torch.uint8).reshape(6, 1, 1, 1).expand(6, 1, 4, 4) * 40
    sheet = grid(images, columns=3, gap=1)
    assert sheet.size == (14, 9)
    assert [sheet.getpixel((5 * (i % 3), 5 * (i // 3))) for i in range(6)] == [0, 40, 80, 120, 160, 200]
    assert grid(images.expand(6, 3, 4, 4), scale=3).mode == "RGB"


def test_small_images_are_enlarged():
    assert [comfortable_scale(size) for size in (8, 16, 32, 64)] == [6, 3, 1, 1]


@pytest.mark.parametrize("ys", [[1.0, 1.0], [2.7, 4.9], [1e-4, 1e3], [3.0], [0.5, 0.500001]])
def test_charts_hold_their_curve(ys):
    svg = Chart(xs=list(range(1, len(ys) + 1)), ys=ys, x_name="step", y_name="loss", log=True).svg()
    numbers = [float(n) for n in re.findall(r"[ML](?:[\d.]+),([-\d.]+)", svg)]
    assert len(numbers) == len(ys) and all(13 <= n <= 221 for n in numbers)
    assert "nan" not in svg and svg.count("<text") >= 3


def test_an_empty_chart_says_so():
    assert "nothing was logged" in Chart(xs=[], ys=[], x_name="step", y_name="loss").svg()
