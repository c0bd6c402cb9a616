"""Devices whose memory is too small for a script's own step."""

from dataclasses import replace

from redeqx.memory import Memory, SearchSpace


def divide_micro_batches(monkeypatch, n_parts):
    """Lets `memory="auto"` find that the first step fits only with each micro-batch in this many parts."""
    memories = iter([Memory(1)])

    def search(space, own, measure, *, to_fastest):
        rows, n = own.strategy.per_device_batch_size // n_parts, own.strategy.accumulate_grad_batches * n_parts
        return [measure(replace(own.strategy, per_device_batch_size=rows, accumulate_grad_batches=n))]

    monkeypatch.setattr("redeqx.memory._need.memory_of", lambda mesh: next(memories, Memory(2**40)))
    monkeypatch.setattr(SearchSpace, "search", search)
