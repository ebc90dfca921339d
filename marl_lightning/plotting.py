"""Learning curves of finished runs, as a table and a picture."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from marl_lightning.games import NashConvResult


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of one run.

    Attributes:
        name: of the run: its folder, relative to the one that was searched.
        env_steps: where the metric was measured, increasing.
        values: what was measured.
    """

    name: str
    env_steps: list[int]
    values: list[float]


def read_curves(folder: str | Path, metric: str) -> list[Curve]:
    """Returns the curves of all runs below ``folder``, sorted by name.

    Args:
        folder: searched for ``metrics.csv``.
        metric: a column of it, such as ``"eval/win_rate"``.

    Raises:
        ValueError: if there is no run, or none measured the metric.
    """
    files = sorted(Path(folder).rglob("metrics.csv"))
    if not files:
        raise ValueError(f"there is no metrics.csv below {folder}: give the folder of a run, or one that holds runs")
    curves, known = [], set()
    for file in files:
        with file.open(newline="") as text:
            rows = list(csv.DictReader(text))
        known |= set(rows[0]) if rows else set()
        points = [(int(row["step"]), float(row[metric])) for row in rows if row.get(metric)]
        if points:
            env_steps, values = zip(*sorted(points), strict=True)
            name = str(file.parent.relative_to(folder))
            curves.append(Curve(name=name, env_steps=list(env_steps), values=list(values)))
    if not curves:
        raise ValueError(f"no run below {folder} measured {metric!r}; they have {', '.join(sorted(known - {'step'}))}")
    return curves


def table(curves: Sequence[Curve], metric: str) -> str:
    """Returns a Markdown table of the last and the best value of each run; of losses and NashConv, less is better."""
    better = min if metric.startswith("nashconv/") or "loss" in metric else max
    lines = [f"| run | env steps | last {metric} | best {metric} | at env step |", "|---|---|---|---|---|"]
    for curve in curves:
        best = better(range(len(curve.values)), key=curve.values.__getitem__)
        numbers = f"{curve.env_steps[-1]:,} | {curve.values[-1]:.4g} | {curve.values[best]:.4g}"
        lines.append(f"| {curve.name} | {numbers} | {curve.env_steps[best]:,} |")
    return "\n".join(lines)


def plot(curves: Sequence[Curve], metric: str, path: str | Path, *, title: str = "") -> Path:
    """Draws the curves over env steps into a PNG and returns its path.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    figure = _figure(width=6, height=3.6)
    axes = figure.subplots()
    for curve in curves:
        axes.plot(curve.env_steps, curve.values, label=curve.name)
    axes.set(xlabel="env steps", ylabel=metric, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(path)
    figure.savefig(path, dpi=120)
    return path


def plot_heat_map(
    values: Sequence[Sequence[float]], names: Sequence[str], path: str | Path, *, title: str = ""
) -> Path:
    """Draws a square matrix, each number in its cell, into a PNG and returns its path.

    Args:
        values: ``[n, n]``.
        names: ``[n]``, of rows and columns alike.
        path: of the picture.
        title: above it.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    figure = _figure(width=2.5 + 0.9 * len(names), height=2.0 + 0.7 * len(names))
    axes = figure.subplots()
    largest = max((abs(value) for row in values for value in row), default=0.0) or 1.0
    image = axes.imshow(values, cmap="RdBu", vmin=-largest, vmax=largest)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            shade = "white" if abs(value) > 0.6 * largest else "black"
            axes.text(j, i, f"{value:.3g}", ha="center", va="center", color=shade)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(title=title)
    figure.colorbar(image)
    path = Path(path)
    figure.savefig(path, dpi=120)
    return path


def plot_gains(result: NashConvResult, path: str | Path, *, title: str = "") -> Path:
    """Draws what each agent could gain by deviating as a bar, with its interval if it is an estimate, into a PNG.

    Args:
        result: of :func:`marl_lightning.games.nash_conv`.
        path: of the picture.
        title: above it; NashConv follows.

    Returns:
        The path.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    agents = list(result.gains)
    figure = _figure(width=2.0 + 0.9 * max(4, len(agents)), height=3.6)
    axes = figure.subplots()
    axes.bar(range(len(agents)), list(result.gains.values()))
    for place, agent in enumerate(agents):
        if agent in result.gain_intervals:
            axes.plot([place, place], result.gain_intervals[agent], color="black", marker="_")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(agents)), agents, rotation=45, ha="right")
    sign = "=" if result.bound == "exact" else "\u2265"
    axes.set(ylabel="gain by the best response found", title=f"{title} NashConv {sign} {result.value:.4g}".strip())
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    path = Path(path)
    figure.savefig(path, dpi=120)
    return path


def _figure(*, width: float, height: float) -> Figure:
    """Returns an empty picture of a size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install "marl-lightning[plot]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def plot_command(arguments: Sequence[str] | None = None) -> None:
    """What ``scripts/plot.py`` does: prints the table and writes ``<metric>.png`` and ``<metric>.md`` to the folder."""
    parser = argparse.ArgumentParser(description="Learning curves of the runs below a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--metric", default="eval/return_mean", help="a column of metrics.csv")
    parser.add_argument("--title", default="")
    options = parser.parse_args(arguments)
    try:
        curves = read_curves(options.folder, options.metric)
        stem = options.folder / options.metric.replace("/", "_")
        picture = plot(curves, options.metric, stem.with_suffix(".png"), title=options.title)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    text = table(curves, options.metric)
    stem.with_suffix(".md").write_text(text + "\n")
    print(f"{text}\n\n{picture}")
