"""The runtime without a model, for everything that only decides."""

from cellar.runtime.steps.fake.model import next_token, penalty
from cellar.runtime.steps.fake.runtime import FakeRuntime, FakeWorker

__all__ = ["FakeRuntime", "FakeWorker", "next_token", "penalty"]
