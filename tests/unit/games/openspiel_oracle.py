"""OpenSpiel's own evaluation, in Python."""

import sys

from absl import logging
from open_spiel.python.algorithms.exploitability import nash_conv
from open_spiel.python.policy import TabularPolicy, tabular_policy_from_callable

__all__ = ["TabularPolicy", "nash_conv", "tabular_policy_from_callable"]

# absl made a handler for what was the error stream when it was imported, and closes it with the handler, which happens
# whenever logging is configured anew. Here that is a file of pytest.
logging.get_absl_handler().python_handler.stream = sys.__stderr__
