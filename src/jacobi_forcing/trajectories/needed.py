"""Whether a folder of trajectories holds the states that a schedule asks for."""

from __future__ import annotations

import dataclasses

from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.schedule import NoiseSchedule
from jacobi_forcing.trajectories.store import TrajectoryReader


def check_states(reader: TrajectoryReader, noise: NoiseSchedule) -> None:
    """Refuse a folder without the states that will be asked for.

    Raises:
        ArtefactError: It holds responses alone, or what `needed_only` kept for another schedule.
    """
    if not reader.has_states:
        raise ArtefactError(
            f"'{reader.folder}' holds responses without the states of their blocks",
            remedy="collect again with states, train with states: on_policy, or train an adapter (mode: adapter)",
        )
    needed = reader.needed_only
    if needed is None:
        return
    different = {key: value for key, value in dataclasses.asdict(noise).items() if needed.get(key) != value}
    if different:
        raise ArtefactError(
            f"'{reader.folder}' holds only the states that another schedule asks for (needed_only)",
            seen=", ".join(f"{key} {needed.get(key)}" for key in different),
            expected=", ".join(f"{key} {value}" for key, value in different.items()),
            remedy="train with the schedule that was collected for, or collect again",
        )
