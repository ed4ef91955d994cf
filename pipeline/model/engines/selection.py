"""Which waiting requests go through the model together."""

from collections.abc import Sequence


def select_batch(pending: Sequence[tuple[object, int]], batch_size: int) -> list[int]:
    """The indexes of at most `batch_size` requests that share a batch with the first one; none if there is none.

    They are neighbours in length. Among all such windows that contain the first request, the one with the least
    padding is chosen.

    Args:
        pending: Group and number of tokens of each request, in the order of arrival.
        batch_size: Requests per batch, at most.
    """
    if not pending:
        return []
    lengths = {index: tokens for index, (group, tokens) in enumerate(pending) if group == pending[0][0]}
    by_length = sorted(lengths, key=lengths.__getitem__)

    def padding(start: int) -> int:
        window = by_length[start : start + batch_size]
        return sum(lengths[window[-1]] - lengths[index] for index in window)

    # Requests of the first one's length are interchangeable, so a window needs to contain any of them.
    equal_positions = [position for position, index in enumerate(by_length) if lengths[index] == lengths[0]]
    latest_start = min(equal_positions[-1], max(0, len(by_length) - batch_size))
    start = min(range(max(0, equal_positions[0] - batch_size + 1), latest_start + 1), key=padding)
    batch = by_length[start : start + batch_size]
    if 0 not in batch:
        batch[max(position for position, index in enumerate(batch) if lengths[index] == lengths[0])] = 0
    return batch
