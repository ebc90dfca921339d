"""NashConv: ``python scripts/nash_conv.py checkpoint=PATH``. All settings are in ``configs/nash_conv.yaml``."""

from marl_lightning.cli import nash_conv_command

if __name__ == "__main__":
    nash_conv_command()
