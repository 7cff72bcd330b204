"""Integer programs over variables that are 0 or 1, solved by HiGHS (Huangfu and Hall, 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import highspy

MICRO = 1e6
"""Costs of variables are in microseconds, at which the solver's tolerances mean little."""


def solver() -> ModuleType | None:
    """The solver's module, loaded when it is asked for: who runs a model that was optimized before does without.

    None where there is no wheel of it: whoever needs it can do with less.
    """
    try:
        import highspy
    except ImportError:
        return None
    return highspy


def available() -> bool:
    """Whether the solver is installed."""
    return solver() is not None


@dataclass
class IntegerProgram:
    """An integer program under construction: all variables are 0 or 1, every row is a lower bound.

    `told` is what the solver said: how it ended, the gap that it left, and the sizes of the program.
    """

    costs: list[float] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float]] = field(default_factory=list)
    told: dict[str, float | str] = field(default_factory=dict)

    def variable(self, cost: float) -> int:
        """The number of a new variable that costs so much (µs) where it is 1."""
        self.costs.append(cost)
        return len(self.costs) - 1

    def row(self, terms: dict[int, float], least: float) -> None:
        """Σ terms ≥ least."""
        self.rows.append(({i: x for i, x in terms.items() if x}, least))

    def solve(self, seconds: float, most_nodes: int | None = None) -> list[float] | None:
        """The values of the variables; None where there is no solution in time. One thread: the same on every run,
        where `most_nodes` of the solver's tree are looked at and not the time ends it.

        It starts from nothing: given a solution to start from, HiGHS 1.16 may call that one optimal when it is not.
        """
        import highspy
        from highspy._core import _Highs

        # not Highs(): that prints a banner to stdout when it is made
        options = highspy.HighsOptions()
        options.output_flag, options.threads, options.random_seed = False, 1, 0
        options.time_limit, options.mip_rel_gap, options.mip_abs_gap = seconds, 1e-6, 1e-3
        if most_nodes is not None:
            options.mip_max_nodes = most_nodes
        running = _Highs()
        running.passOptions(options)
        running.passModel(self._model())
        running.run()
        info = running.getInfo()
        status = running.modelStatusToString(running.getModelStatus())
        self.told.update(
            exact=status, gap=float(info.mip_gap), bound_ms=info.mip_dual_bound / MICRO * 1e3,
            solver_nodes=float(info.mip_node_count), variables=len(self.costs), rows=len(self.rows),
        )  # fmt: skip
        feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if not feasible or not math.isfinite(info.mip_gap):
            return None
        return list(running.getSolution().col_value)

    def _model(self) -> highspy.HighsLp:
        import highspy

        lp = highspy.HighsLp()
        n, m = len(self.costs), len(self.rows)
        lp.num_col_, lp.num_row_ = n, m
        lp.col_cost_ = np.array(self.costs)
        lp.col_lower_, lp.col_upper_ = np.zeros(n), np.ones(n)
        lp.integrality_ = [highspy.HighsVarType.kInteger] * n
        lp.row_lower_ = np.array([least for _, least in self.rows])
        lp.row_upper_ = np.full(m, highspy.kHighsInf)
        starts = np.cumsum([0, *(len(terms) for terms, _ in self.rows)])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = starts.astype(np.int32)
        lp.a_matrix_.index_ = np.array([i for terms, _ in self.rows for i in terms], np.int32)
        lp.a_matrix_.value_ = np.array([x for terms, _ in self.rows for x in terms.values()])
        return lp


__all__ = ["MICRO", "IntegerProgram", "available", "solver"]
