"""SlotCache against a plain list of keys a row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.cache import LayerShape, SlotCache
from draftwood.core.errors import UnsupportedModel

WIDE = LayerShape(2, 3, 5, torch.float64, torch.device("cpu"))
NARROW = LayerShape(1, 4, 4, torch.float64, torch.device("cpu"))
LAYOUT = {0: WIDE, 1: NARROW, 3: WIDE}  # layer 2 shares another layer's states and stores nothing


def states(shape: LayerShape, rows: int, width: int, start: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in which every column has a number of its own."""
    column = start + torch.arange(rows * width, dtype=torch.float64).view(rows, 1, width, 1)
    keys = column.expand(rows, shape.heads, width, shape.key_width)
    return keys, -column.expand(rows, shape.heads, width, shape.value_width)


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, object]]:
    """A random life of a cache: rows come and go, forwards write, paths are kept."""
    return draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("extend"), st.integers(1, 3)),
                st.tuples(st.just("write"), st.tuples(st.integers(1, 9), st.integers(0, 2), st.randoms())),
                st.tuples(st.just("select"), st.randoms()),
            ),
            min_size=1,
            max_size=12,
        )
    )


@settings(deadline=None, max_examples=150)
@given(scripts())
def test_any_life_of_a_cache_keeps_what_was_committed(script: list[tuple[str, object]]) -> None:
    cache = SlotCache(LAYOUT, 0, capacity=2)
    model: list[list[float]] = []
    number = 1.0
    for verb, argument in script:
        if verb == "extend":
            cache.extend(argument)
            model += [[] for _ in range(argument)]
        elif verb == "select":
            order = [row for row in range(len(model)) if argument.random() < 0.8]
            argument.shuffle(order)
            cache.select(order)
            model = [model[row] for row in order]
        elif model:
            width, first, random = argument
            first = min(first, len(model) - 1)
            number = write(cache, model, width, first, random, number)
        assert cache.lengths == [len(row) for row in model]


def write(cache: SlotCache, model: list[list[float]], width: int, first: int, random, number: float) -> float:
    """One forward over the rows from `first` on; commits a few columns and a path, and checks what is read."""
    rows = len(model) - first
    span = cache.open(width, first)
    assert span == max(len(row) for row in model[first:]) + width
    for layer, shape in LAYOUT.items():
        written = states(shape, rows, width, number)
        keys, values = cache.update(*written, layer)
        assert keys.shape == (rows, shape.heads, span, shape.key_width)
        assert values.shape == (rows, shape.heads, span, shape.value_width)
        for row in range(rows):
            expected = [*model[first + row], *(number + row * width + column for column in range(width))]
            assert keys[row, -1, : len(expected), -1].tolist() == expected
            assert values[row, 0, : len(expected), 0].tolist() == [-value for value in expected]
    pending = random.randint(0, width)
    cache.advance([pending] * rows)
    paths = [sorted(random.sample(range(width - pending), random.randint(0, width - pending))) for _ in range(rows)]
    cache.keep(paths)
    for row, path in enumerate(paths):
        start = number + row * width
        model[first + row] += [start + column for column in range(pending)]
        model[first + row] += [start + pending + column for column in path]
    return number + rows * width


def test_a_path_without_gaps_moves_nothing() -> None:
    cache = SlotCache(LAYOUT, 1, 8)
    cache.open(4)
    for layer, shape in LAYOUT.items():
        cache.update(*states(shape, 1, 4, 1.0), layer)
    before = [store.data_ptr() for stores in cache._stores.values() for store in stores]
    cache.keep([[0, 1]])
    assert before == [store.data_ptr() for stores in cache._stores.values() for store in stores]
    assert cache.lengths == [2]


def test_rows_that_leave_make_room_without_new_memory() -> None:
    cache = SlotCache(LAYOUT, 4, 8)
    before = {store.data_ptr() for stores in cache._stores.values() for store in stores}
    for _ in range(3):
        cache.select([0, 3, 2])
        cache.extend(1)
    assert before == {store.data_ptr() for stores in cache._stores.values() for store in stores}


@pytest.mark.parametrize("rows", [2, 3], ids=["in place", "in larger tensors"])
@pytest.mark.parametrize("stay", [[1], []])
def test_what_a_row_leaves_behind_never_reaches_another(stay: list[int], rows: int) -> None:
    """A diverged row holds NaN, and a weight of 0 times NaN is NaN."""
    cache = SlotCache(LAYOUT, 2, 8)
    cache.open(3)
    for layer, shape in LAYOUT.items():
        nan, numbers = torch.tensor(torch.nan), states(shape, 2, 3, 1.0)[1]
        cache.update(nan.expand(2, shape.heads, 3, shape.key_width), numbers, layer)
    cache.select(stay)
    cache.extend(rows - len(stay))
    for keys, values in cache._stores.values():
        assert not keys[:, len(stay) :].isnan().any()
        assert not values[:, len(stay) :].any()


def test_capacity_doubles() -> None:
    cache = SlotCache(LAYOUT, 1, 4)
    for expected in (4, 8, 16, 16):
        cache.open(3)
        cache.advance([3])
        assert cache.capacity == expected


@pytest.mark.parametrize("method", ["update_conv_state", "update_recurrent_state", "has_previous_state"])
def test_recurrent_layers_are_refused(method: str) -> None:
    with pytest.raises(UnsupportedModel, match="recurrent"):
        getattr(SlotCache(LAYOUT), method)(0)
