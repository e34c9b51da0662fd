"""States: the values people see, and the one table of transitions."""

from __future__ import annotations

import pytest

from cyclone.states import TRANSITIONS, RunState, StepState


@pytest.mark.contract("D7")
def test_a_run_has_four_states_and_three_of_them_are_terminal() -> None:
    assert [state.value for state in RunState] == ["running", "completed", "failed", "cancelled"]
    assert {state for state in RunState if state.terminal} == set(RunState) - {RunState.RUNNING}


@pytest.mark.contract("D6", "D8", "D9")
def test_the_states_of_a_step_are_those_of_the_column() -> None:
    values = "pending scheduled available running waiting completed discarded cancelled"
    assert [state.value for state in StepState] == values.split()
    assert StepState.EXHAUSTED.value == "discarded"
    assert {state for state in StepState if state.terminal} == {
        StepState.COMPLETED,
        StepState.EXHAUSTED,
        StepState.CANCELLED,
    }


@pytest.mark.contract("D8", "O1")
def test_only_a_claim_makes_a_step_running_and_only_reopening_leaves_an_end() -> None:
    assert set(TRANSITIONS) == set(StepState)
    assert [state for state, after in TRANSITIONS.items() if StepState.RUNNING in after] == [StepState.AVAILABLE]
    assert TRANSITIONS[StepState.COMPLETED] == frozenset()
    assert TRANSITIONS[StepState.EXHAUSTED] == {StepState.AVAILABLE}
