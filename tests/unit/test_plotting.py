"""Curves, table and picture of runs."""

import imageio.v3 as imageio
import pytest

from marl_lightning.plotting import plot_command, read_curves


@pytest.fixture
def runs(tmp_path):
    for seed, values in ((1, ("0.5", "", "0.25")), (2, ("0.0", "1.0", ""))):
        folder = tmp_path / f"seed_{seed}"
        folder.mkdir()
        rows = [f"{10 * (i + 1)},{value}" for i, value in enumerate(values)]
        (folder / "metrics.csv").write_text("\n".join(["step,eval/win_rate", *rows]) + "\n")
    return tmp_path


def test_rows_without_the_metric_are_left_out(runs):
    first, second = read_curves(runs, "eval/win_rate")
    assert (first.name, first.env_steps, first.values) == ("seed_1", [10, 30], [0.5, 0.25])
    assert (second.env_steps, second.values) == ([10, 20], [0.0, 1.0])


def test_command_prints_a_table_and_writes_a_picture(runs, capsys):
    plot_command([str(runs), "--metric", "eval/win_rate"])
    out = capsys.readouterr().out
    assert "| seed_1 | 30 | 0.25 | 0.5 | 10 |" in out
    assert "| seed_2 | 20 | 1 | 1 | 20 |" in out
    assert imageio.imread(runs / "eval_win_rate.png").ndim == 3
    assert (runs / "eval_win_rate.md").read_text() in out


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--metric", "lost"], "they have eval/win_rate"), (["nothing"], "no metrics.csv")]
)
def test_mistakes_are_one_line(runs, arguments, message, capsys):
    folder = [str(runs)] if arguments[0] == "--metric" else [str(runs / arguments.pop())]
    with pytest.raises(SystemExit):
        plot_command(folder + arguments)
    assert message in capsys.readouterr().err
