"""What a client keeps of its calls, and tells the others."""

from dtckpt.coordination.identity import BarrierCalls, OperationReport


def test_calls_are_numbered_upwards():
    calls = BarrierCalls()
    assert [calls.begin(of_operation=number % 2 == 0) for number in range(3)] == [1, 2, 3]


def test_report_follows_an_operation_from_its_first_round_to_its_end():
    calls = BarrierCalls()
    first = calls.begin(of_operation=True)
    calls.wait_at("save/begin")
    assert calls.report == OperationReport("", 0, "save/begin")
    calls.end(first, "x")
    assert calls.report == OperationReport("x", 1)
    calls.end(calls.begin(of_operation=True), "x")
    assert calls.report == OperationReport("x", 2)
    calls.leave_operation()
    assert calls.report == OperationReport("", 2)


def test_interrupted_call_that_ends_late_does_not_take_the_client_out_of_its_next_operation():
    calls = BarrierCalls()
    interrupted = calls.begin(of_operation=True)
    calls.leave_operation()
    calls.end(calls.begin(of_operation=True), "next")
    calls.end(interrupted, "")
    assert calls.report == OperationReport("next", 2)


def test_client_that_leaves_an_operation_waits_for_no_answer():
    calls = BarrierCalls()
    interrupted = calls.begin(of_operation=True)
    calls.wait_at("save/begin")
    calls.leave_operation()
    assert calls.report == OperationReport("", 1)
    calls.end(interrupted, "begun meanwhile")
    assert calls.report == OperationReport("", 1)
