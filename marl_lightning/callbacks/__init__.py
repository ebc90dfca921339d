"""Callbacks: evaluation, videos, checkpoints, the end of training, throughput and progress, all by env steps."""

from marl_lightning.callbacks.checkpoint import EnvStepCheckpoint
from marl_lightning.callbacks.evaluation import EvaluationCallback
from marl_lightning.callbacks.exploration import BoltzmannSchedule, EpsilonSchedule
from marl_lightning.callbacks.interrupt import TrainingInterrupted
from marl_lightning.callbacks.nash_conv import NashConvCallback
from marl_lightning.callbacks.opponent_pool import OpponentPoolCallback
from marl_lightning.callbacks.progress import EnvStepProgressBar
from marl_lightning.callbacks.sidecar import ResumeError
from marl_lightning.callbacks.stop import StopAtEnvSteps
from marl_lightning.callbacks.throughput import ThroughputMonitor
from marl_lightning.callbacks.video import VideoCallback

__all__ = [
    "BoltzmannSchedule",
    "EnvStepCheckpoint",
    "EnvStepProgressBar",
    "EpsilonSchedule",
    "EvaluationCallback",
    "NashConvCallback",
    "OpponentPoolCallback",
    "ResumeError",
    "StopAtEnvSteps",
    "ThroughputMonitor",
    "TrainingInterrupted",
    "VideoCallback",
]
