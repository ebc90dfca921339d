"""Cross-play: ``python scripts/cross_play.py checkpoints=[PATH,PATH]``. All settings: ``configs/cross_play.yaml``."""

from marl_lightning.cli import cross_play_command

if __name__ == "__main__":
    cross_play_command()
