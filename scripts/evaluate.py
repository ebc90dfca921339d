"""Evaluates: ``python scripts/evaluate.py checkpoint=PATH``. All settings are in ``configs/evaluate.yaml``."""

from marl_lightning.cli import evaluate_command

if __name__ == "__main__":
    evaluate_command()
