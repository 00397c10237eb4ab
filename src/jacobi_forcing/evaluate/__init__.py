"""What answers are worth: graders for tasks, and the quality of a model's greedy answers."""

from __future__ import annotations

from jacobi_forcing.evaluate.benchmarks import BENCHMARKS, Benchmark, Grade, benchmark
from jacobi_forcing.evaluate.quality import Quality, answers, loops, quality_of
from jacobi_forcing.evaluate.sandbox import Isolation, Outcome, SandboxLimits, isolation, run_program
from jacobi_forcing.evaluate.statistics import Wilson, mcnemar, paired_bootstrap
from jacobi_forcing.evaluate.tasks import final_number, grade

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Grade",
    "Isolation",
    "Outcome",
    "Quality",
    "SandboxLimits",
    "Wilson",
    "answers",
    "benchmark",
    "final_number",
    "grade",
    "isolation",
    "loops",
    "mcnemar",
    "paired_bootstrap",
    "quality_of",
    "run_program",
]
