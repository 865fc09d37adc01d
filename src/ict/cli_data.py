"""`ict data …`: look at images, prepare them, bring public sets."""

from pathlib import Path
from typing import Annotated

import typer

from ict.config import NATURAL, DataConfig
from ict.download import Download, fetch
from ict.reading import require

data = typer.Typer(no_args_is_help=True)

SourceArgument = Annotated[
    str,
    typer.Argument(
        help="A folder, .zip, .tar(.gz), shards like shard-{000..127}.tar, .npy, .npz, hf:owner/name; or digits, "
        "cifar10, imagenet64."
    ),
]
SizeOption = Annotated[int, typer.Option(help="Pixels a side.")]
GreyOption = Annotated[bool, typer.Option("--grey", help="One channel instead of three.")]
FitOption = Annotated[str, typer.Option(help="How an image becomes square: crop or pad.")]
BackgroundOption = Annotated[int, typer.Option(help="Grey under transparent pixels and beside padded ones.")]
PathOption = Annotated[str, typer.Option(help="Where cifar10 or imagenet64 is.")]
SplitOption = Annotated[str, typer.Option(help="Which part of a set that has several.")]


def data_config(source: str, size: int, grey: bool, fit: str, background: int, path: str, split: str) -> DataConfig:
    size, channels = NATURAL.get(source, (size, 1 if grey else 3))
    return DataConfig(
        source=source, path=path, split=split, image_size=size, channels=channels, fit=fit, background=background
    )


@data.command("prepare", help="Decode a pile of images once, so that training starts at once.")
def data_prepare(
    source: SourceArgument,
    size: SizeOption = 64,
    grey: GreyOption = False,
    fit: FitOption = "crop",
    background: BackgroundOption = 255,
    path: PathOption = "",
    split: SplitOption = "train",
) -> None:
    config = data_config(source, size, grey, fit, background, path, split)

    from ict.data.images import Images
    from ict.data.prepare import prepare, read_manifest
    from ict.data.sources import open_source
    from ict.display import DataProgress

    found = open_source(config)
    if isinstance(found, Images):
        print(f"{len(found):,} images; {source} needs no preparing")
        return
    with DataProgress() as progress:
        folder = prepare(found, config, progress)
    manifest = read_manifest(folder)
    print(f"{manifest['count']:,} images, {len(manifest['refused']):,} refused: {folder}")


@data.command("inspect", help="Count and look at a set: sizes, classes, refused files, duplicates, a contact sheet.")
def data_inspect(
    source: SourceArgument,
    size: SizeOption = 64,
    grey: GreyOption = False,
    fit: FitOption = "crop",
    background: BackgroundOption = 255,
    path: PathOption = "",
    split: SplitOption = "train",
    out: Annotated[Path | None, typer.Option(help="A .png for a contact sheet of 100 images.")] = None,
) -> None:
    require(out is None or out.suffix.lower() == ".png", f"--out {out}: the sheet is a .png")
    config = data_config(source, size, grey, fit, background, path, split)

    from rich.console import Console

    from ict.data.inspect import inspect
    from ict.display import DataProgress
    from ict.files import write_atomically
    from ict.info import describe_images
    from ict.pictures import comfortable_scale, grid, png

    with DataProgress() as progress:
        found = inspect(config, progress)
    Console().print(describe_images(source, found))
    if out is not None:
        write_atomically(out, png(grid(found.some(100), columns=10, scale=comfortable_scale(config.image_size))))
        print(f"contact sheet: {out}")


@data.command("get", help="Download a public set or file into the cache, and check it.")
def data_get(
    name: Annotated[
        str,
        typer.Argument(help="cifar10; inception (what FID needs); lpips-vgg16 or lpips-alexnet (what LPIPS needs)."),
    ],
    url: Annotated[
        str | None,
        typer.Option("--from", help="Another place of the same file; for LPIPS, of a folder that holds both."),
    ] = None,
) -> None:
    known = {"cifar10": get_cifar10, "inception": get_inception, "lpips-vgg16": get_lpips, "lpips-alexnet": get_lpips}
    require(name in known, f"{name!r} cannot be brought: choose from {', '.join(known)}")
    print(known[name](name, url))


def get_cifar10(name: str, url: str | None) -> str:
    from ict.data import cifar10

    archive = cifar10.home().with_name("cifar-10-binary.tar.gz")
    if not cifar10.is_home():
        bring(name, cifar10.ARCHIVE, archive, url)
        cifar10.unpack(archive, cifar10.home())
        archive.unlink()
    return f"60,000 images, checked: {cifar10.home()}"


def get_inception(name: str, url: str | None) -> str:
    from ict.evaluation.inception import WEIGHTS
    from ict.files import cache_home

    place = cache_home() / Path(WEIGHTS.url).name
    bring(name, WEIGHTS, place, url)
    return f"the Inception of FID, checked: {place}"


def get_lpips(name: str, url: str | None) -> str:
    from ict.lpips import places

    found = places(name.removeprefix("lpips-"))
    for place, what in found.items():
        bring(name, what, place, url and f"{url.rstrip('/')}/{Path(what.url).name}")
    return f"the weights of LPIPS, checked: {' and '.join(map(str, found))}"


def bring(name: str, what: Download, place: Path, url: str | None) -> None:
    from ict.display import DownloadProgress

    with DownloadProgress(name, what.size) as progress:
        fetch(what, place, url=url, progress=progress)
