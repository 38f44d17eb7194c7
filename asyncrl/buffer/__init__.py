"""The replay buffer: admission bounds staleness, selection keeps groups whole, nothing leaves without a reason."""

from asyncrl.buffer.config import BufferConfig
from asyncrl.buffer.recorder import MemoryRecorder, Recorder
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.view import BufferView, Missing, Slot

__all__ = ["BufferConfig", "BufferView", "MemoryRecorder", "Missing", "Recorder", "ReplayBuffer", "Slot"]
