"""Trains: ``python scripts/train.py experiment=mappo_smac``. All settings are in ``configs/train.yaml``."""

from marl_lightning.cli import train_command

if __name__ == "__main__":
    train_command()
