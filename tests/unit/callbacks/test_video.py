import logging
from unittest import mock

import imageio.v3 as imageio
import numpy as np
import pytest
from dummies import WalkEnv, fit
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from marl_lightning.callbacks import VideoCallback, video


@pytest.fixture
def recorded(monkeypatch):
    """Frames that were recorded, by evaluation."""
    frames = []

    def evaluate(*args, **kwargs):
        result = evaluate_it(*args, **kwargs)
        frames.append(result.frames)
        return result

    evaluate_it = video.evaluate
    monkeypatch.setattr(video, "evaluate", evaluate)
    return frames


def test_best_episode_is_written_when_due(tmp_path, recorded):
    callback = VideoCallback(every_env_steps=50, directory=tmp_path / "v", episodes=3, fps=7)
    fit(tmp_path, [callback])
    paths = [tmp_path / "v" / f"env_steps_{step}.mp4" for step in (60, 100)]
    assert sorted((tmp_path / "v").iterdir()) == sorted(paths)
    for path, frames in zip(paths, recorded, strict=True):
        assert len(imageio.imread(path, plugin="pyav")) == len(frames)
        assert imageio.immeta(path, plugin="pyav")["fps"] == 7
        times = frames[:, 0, 0, 0].astype(int)
        np.testing.assert_array_equal(times - times[0], np.arange(len(frames)))  # one episode, from its start
        assert times[0] % 10 == 0
    assert callback.seconds > 0


def test_default_folder_is_that_of_the_logger(tmp_path):
    fit(tmp_path, [VideoCallback(every_env_steps=100, episodes=1)])
    assert (tmp_path / "lightning_logs" / "version_0" / "videos" / "env_steps_100.mp4").exists()


def test_game_without_pictures_gives_one_warning(tmp_path, recwarn):
    callback = VideoCallback(every_env_steps=30, directory=tmp_path / "v")
    fit(tmp_path, [callback], env=WalkEnv(num_envs=4, renders=False))
    assert [str(w.message) for w in recwarn if "no videos" in str(w.message)] == [
        "no videos will be made: test/walk cannot be rendered"
    ]
    assert not (tmp_path / "v").exists()


def test_tensorboard_shows_a_gif(tmp_path, recorded):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fit(tmp_path, [VideoCallback(every_env_steps=100, episodes=2)], loggers=[TensorBoardLogger(tmp_path)])
    events = event_accumulator.EventAccumulator(str(tmp_path / "lightning_logs" / "version_0")).Reload()
    (image,) = events.Images("eval/video")
    assert image.step == 100
    assert imageio.imread(image.encoded_image_string, index=None).shape == recorded[0].shape


def test_wandb_gets_the_file(tmp_path):
    logger = mock.Mock(spec=WandbLogger)
    frames = np.zeros((2, 16, 16, 3), np.uint8)
    video._hand_over(logger, tmp_path / "a.mp4", frames, fps=10, env_steps=70)
    logger.log_video.assert_called_once_with("eval/video", [str(tmp_path / "a.mp4")], step=70)


def test_other_loggers_are_left_alone(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "marl_lightning.callbacks.video")
    fit(tmp_path, [VideoCallback(every_env_steps=100, episodes=1)])
    assert "CSVLogger takes no videos" in caplog.text
