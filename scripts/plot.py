"""Draws learning curves: ``python scripts/plot.py FOLDER --metric eval/win_rate``."""

from marl_lightning.plotting import plot_command

if __name__ == "__main__":
    plot_command()
