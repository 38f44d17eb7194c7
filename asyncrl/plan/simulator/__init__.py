"""A run on a virtual clock: engines, trainer and updates as events, and the real buffer's decisions between them."""

from asyncrl.plan.simulator.instance import Decoder
from asyncrl.plan.simulator.result import Simulated
from asyncrl.plan.simulator.scenario import Failures, Scenario, Trainer, Updates
from asyncrl.plan.simulator.simulation import Simulation, simulate

__all__ = ["Decoder", "Failures", "Scenario", "Simulated", "Simulation", "Trainer", "Updates", "simulate"]
