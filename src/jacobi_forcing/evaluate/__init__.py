"""What answers are worth: graders for tasks, and the quality of a model's greedy answers."""

from __future__ import annotations

from jacobi_forcing.evaluate.quality import Quality, Wilson, answers, loops, quality_of
from jacobi_forcing.evaluate.tasks import final_number, grade

__all__ = ["Quality", "Wilson", "answers", "final_number", "grade", "loops", "quality_of"]
