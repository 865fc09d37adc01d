"""The part of a run's page that shows its scores."""

import html

from ict.evaluation.chart import Chart
from ict.evaluation.records import Record, published_rows, score_names, with_spread


def score_section(records: list[Record]) -> str:
    """The scores of this run beside the paper's, and their curve over the checkpoints."""
    if not records:
        return ""
    kinds = dict.fromkeys(map(kind_of, records))
    tables = [score_table([record for record in records if kind_of(record) == kind]) for kind in kinds]
    return (
        "<h2>Scores</h2>"
        '<p class="note">Lower is better for Fréchet and kernel distances (FID, FD, KID, KD); precision is the share '
        "of samples that look real, recall the share of the real images that the samples reach. <i>nearest</i> near or "
        "above 1 and few <i>copies</i> say that the model does not repeat the set by heart.</p>" + "".join(tables)
    )


def kind_of(record: Record) -> tuple[str, str, int, str]:
    """What scores must have in common to stand in one table."""
    return record["features"], record["weights"], record["samples"], record["real"]["checksum"]


def levels_of(record: Record) -> str:
    return ", ".join(f"{sigma:.4g}" for sigma in record["sigmas"])


def score_table(records: list[Record]) -> str:
    """Records of one measure: a table, and a curve where several steps of the run were scored."""
    names = score_names(records)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("model", "step", "EMA", "σ", *names))
    rows = []
    for record in sorted(records, key=lambda r: (r["step"] or 0, len(r["sigmas"]))):
        seeds = f", {len(record['seeds'])} seeds" if len(record["seeds"]) > 1 else ""
        step = "" if record["step"] is None else f"{record['step']:,}"
        cells = [f"{name_of(record)}{seeds}", step, str(record["ema"] or ""), levels_of(record) or "–"]
        cells += [with_spread(name, record["scores"]) for name in names]
        rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    for name, calls, scores in published_rows(records[0]["real"]["source"], names):
        cells = [
            f"{name} (published)",
            "",
            "",
            f"{calls} call{'s' * (calls > 1)}",
            *(with_spread(one, scores) for one in names),
        ]
        rows.append("".join(f'<td class="soft">{html.escape(cell)}</td>' for cell in cells))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    first, real = records[0], records[0]["real"]
    about = f"{first['samples']:,} samples against {real['count']:,} images of {real['source']}, by {first['features']}"
    table = (
        f'<div class="card wide"><h3>{html.escape(about)}</h3><table class="scores"><tr>{head}</tr>{body}</table></div>'
    )
    return table + score_curve(records, names[0])


def name_of(record: Record) -> str:
    """What a score is of; a run that has gone back has two ways through the same steps."""
    times = record.get("attempt", 0)
    return record["model"] + (f", after going back {times} time{'s' * (times > 1)}" if times else "")


def score_curve(records: list[Record], name: str) -> str:
    """The first score over the steps of the run: a curve for each way of scoring that has several."""
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        if record["step"]:
            way = (name_of(record), f"EMA {record['ema']}, σ = {levels_of(record)}")
            curves.setdefault(way, {})[record["step"]] = max(record["scores"][name], 1e-6)  # the axis is logarithmic
    cards = []
    for (model, how), points in curves.items():
        if len(points) > 1:
            xs = sorted(points)
            chart = Chart(xs=xs, ys=[points[x] for x in xs], x_name="step", y_name=name, log=True)
            note = html.escape(f"{model}: {how}")
            cards.append(f'<div class="card"><h3>{html.escape(name)}</h3><p class="note">{note}</p>{chart.svg()}</div>')
    narrow = " narrow" if len(cards) == 1 else ""
    return f'<div class="cards{narrow}">{"".join(cards)}</div>' if cards else ""
