"""Own the laws of the books: each row has one use, and after a lost answer the books agree with the magazine."""

import numpy as np
import pytest

from kvlease.integrations.vllm.offload.books import Books, Written
from kvlease.integrations.vllm.offload.jobs import Jobs
from kvlease.magazine import Exchanged, Inventory

BLANK = bytes(32)


def name(number: int) -> bytes:
    """Return the key of a name."""
    return bytes([number]) * 32


def books(num_rows: int = 32, stock: tuple[int, ...] = ()) -> Books:
    """Return books of a pool that have some rows in stock."""
    opened = Books()
    opened.wipe(num_rows)
    opened.stock = list(stock)
    return opened


def rows(*numbers: int) -> np.ndarray:
    """Return the ids of rows."""
    return np.array(numbers, np.int32)


def answer(*taken: int) -> Exchanged:
    """Return the answer to an exchange that takes rows."""
    none = np.zeros(0, np.uint8)
    return Exchanged(
        published=none,
        retracted=none,
        dropped=none,
        held=rows(),
        held_all_blocks=rows(),
        held_all_keys=b"",
        taken_running=rows(),
        taken_new=rows(*taken),
        num_available=0,
        num_magazines=1,
    )


def inventory(**there: int) -> Inventory:
    """Return the inventory of a magazine: rows such as r5, and the numbers of their keys, 0 for a private row."""
    found = {int(row[1:]): number for row, number in there.items()}
    keys = b"".join(name(number) if number else BLANK for number in found.values())
    return Inventory(blocks=rows(*found), keys=keys, sequence=1)


def write(opened: Books, row: int, number: int, position: int = 0) -> None:
    """Have a job store into a row of the stock, and end the job."""
    (got,) = opened.write(1)
    assert got == row
    assert opened.end_write(row)
    opened.written.append(Written(row=row, name=name(number), position=position))


def test_written_rows_are_published_in_token_order_and_dropped() -> None:
    """One exchange publishes written rows, drops them in token order, and brings new stock."""
    opened = books(stock=(4, 5))
    write(opened, 5, 1, position=64)
    write(opened, 4, 2, position=32)

    order = opened.order(take=3)
    opened.settle(answer(7, 8))

    assert list(order.publish_blocks) == [4, 5]
    assert order.publish_keys == name(2) + name(1)
    assert list(order.drop_blocks) == [4, 5]
    assert order.take_new == 3
    assert opened.stock == [7, 8]
    assert not opened.is_due


def test_a_row_leaves_with_its_last_holder() -> None:
    """A row that two requests hold stays until both have released it."""
    opened = books()
    opened.hold(rows(3, 4))
    opened.hold(rows(4))

    opened.release(rows(3, 4))

    assert opened.leaving == [3]
    assert opened.num_held == 1
    opened.release(rows(4))
    assert opened.leaving == [3, 4]


def test_rows_of_a_failed_store_come_back_to_the_stock() -> None:
    """A row of a failed store is in stock again, once."""
    opened = books(stock=(4,))
    opened.write(1)

    opened.unwrite(4)
    opened.unwrite(4)

    assert opened.stock == [4]


@pytest.mark.parametrize("is_carried_out", [True, False], ids=["carried out", "never arrived"])
def test_a_lost_answer_is_made_good(is_carried_out: bool) -> None:
    """Whether a lost exchange was carried out or not, every row has one use afterwards."""
    opened = books(stock=(4, 5, 6))
    write(opened, 6, 1)
    opened.write(1)
    opened.hold(rows(9, 10))
    opened.release(rows(10))
    opened.order(take=1)

    there = {"r4": 0, "r5": 0, "r9": 9} | ({"r7": 0} if is_carried_out else {"r6": 0, "r10": 8})
    lost = opened.reconcile(inventory(**there), [(name(9), 9)])

    assert lost == set()
    assert opened.stock == ([4, 7] if is_carried_out else [4])
    assert [one.row for one in opened.written] == ([] if is_carried_out else [6])
    assert opened.leaving == ([] if is_carried_out else [10])
    assert opened.end_write(5)


def test_rows_that_are_held_no_more_are_lost() -> None:
    """Rows that requests believe to hold, but that the magazine lacks under that key, are reported and not released."""
    opened = books()
    opened.hold(rows(1, 2, 3))

    lost = opened.reconcile(inventory(r1=1, r2=7), [(name(1), 1), (name(2), 2), (name(3), 3)])

    assert lost == {2, 3}
    assert opened.num_held == 1
    assert opened.leaving == [2]


def test_only_held_rows_are_condemned() -> None:
    """A wrong row leaves the index only where a request holds it; other rows are not ours to take out."""
    opened = books()
    opened.hold(rows(1))

    opened.condemn([1, 2, 99, -1])
    order = opened.order()

    assert list(order.retract_blocks) == [1]


def test_forgotten_jobs_end_when_all_ranks_have_reported() -> None:
    """A job that vLLM forgot is reported at its end, after the last rank; other jobs are not."""
    jobs = Jobs(2)
    spec = type("Spec", (), {"rows": rows(1), "block_ids": rows(5, 6)})()
    job = type("Job", (), {"req_id": "a", "src_spec": spec, "dst_spec": spec})()
    jobs.plan({1: job}, {2: job})

    assert jobs.report({1: 2}) == []
    (forgotten,) = jobs.forget()
    assert forgotten.is_store
    assert jobs.blocks_read() == {5, 6}
    assert jobs.report({2: 1}) == []
    assert jobs.report({2: 1, 3: 1}) == [forgotten]
    assert jobs.blocks_read() == set()
