"""Parameters, lookup tables and collections: names, buffers, views, gradients and refusals."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from dynbatch.config import config
from dynbatch.errors import ConfigurationError, IndexRangeError, OutOfMemoryError, ShapeError
from dynbatch.parameters import ParameterCollection


@pytest.fixture
def pc() -> ParameterCollection:
    return ParameterCollection()


def test_a_parameter_has_shape_values_and_gradient_in_the_users_order(pc: ParameterCollection) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    w = pc.add_parameters((2, 3), init=values, name="W")
    assert w.shape == (2, 3) and w.dim() == ((2, 3), 1)
    assert w.data.shape == (3, 2), "values are stored column-major"
    np.testing.assert_array_equal(w.as_array(), values)
    np.testing.assert_array_equal(w.npvalue(), values)
    np.testing.assert_array_equal(w.data, values.T)
    np.testing.assert_array_equal(w.grad_as_array(), np.zeros((2, 3)))
    w.grad[...] = values.T
    np.testing.assert_array_equal(w.grad_as_array(), values)
    assert w.as_array().flags.c_contiguous and w.grad_as_array().flags.c_contiguous


def test_copies_are_copies(pc: ParameterCollection) -> None:
    w, table = pc.add_parameters(3, init=1.0), pc.add_lookup_parameters((3, 2), init=1.0)
    for array in (w.as_array(), w.grad_as_array(), table.as_array(), table.row_as_array(0), table.grad_as_array()):
        array[...] = 7
    assert (w.as_array() == 1).all() and (table.as_array() == 1).all()
    assert (w.grad_as_array() == 0).all() and (table.grad_as_array() == 0).all()


def test_a_tensor_keeps_its_axes(pc: ParameterCollection) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(pc.add_parameters((2, 3, 4), init=values).as_array(), values)
    table = pc.add_lookup_parameters((2, 3, 4), init=values)
    assert table.data.shape == (2, 4, 3)
    np.testing.assert_array_equal(table.as_array(), values)
    np.testing.assert_array_equal(table.row_as_array(1), values[1])
    np.testing.assert_array_equal(table.rows_as_array([1, 0, 1]), values[[1, 0, 1]])


def test_set_value_zero_and_scale_change_the_version(pc: ParameterCollection) -> None:
    w = pc.add_parameters((2, 2), init=3.0)
    versions = [pc.version]
    w.set_value([[1, 2], [3, 4]])
    versions.append(pc.version)
    w.scale(2)
    np.testing.assert_array_equal(w.as_array(), [[2, 4], [6, 8]])
    versions.append(pc.version)
    w.grad[...] = 1
    w.scale_gradient(0.5)
    np.testing.assert_array_equal(w.grad_as_array(), np.full((2, 2), 0.5))
    w.zero()
    assert not w.as_array().any() and not w.grad_as_array().any()
    versions.append(pc.version)
    pc.mark_changed()
    versions.append(pc.version)
    assert versions == sorted(set(versions)), "every change is a new version"


def test_lookup_values_can_be_set_and_change_the_version(pc: ParameterCollection) -> None:
    table = pc.add_lookup_parameters((3, 2))
    versions = [pc.version]
    table.init_from_array(np.arange(6).reshape(3, 2))
    versions.append(pc.version)
    table.init_row(1, [7, 8])
    versions.append(pc.version)
    np.testing.assert_array_equal(table.as_array(), [[0, 1], [7, 8], [4, 5]])
    table.scale(2)
    versions.append(pc.version)
    np.testing.assert_array_equal(table.row_as_array(1), [14, 16])
    table.add_gradient(np.array([2]), np.ones((1, 2), dtype=np.float32))
    table.zero()
    versions.append(pc.version)
    assert not table.as_array().any() and not table.grad_as_array().any() and len(table.touched) == 0
    assert versions == sorted(set(versions))


@pytest.mark.parametrize("dim", [(5, 2, 3), (5, (2, 3)), [5, 2, 3]])
def test_lookup_rows_may_be_matrices(pc: ParameterCollection, dim: object) -> None:
    table = pc.add_lookup_parameters(dim)  # type: ignore[arg-type]
    assert table.size == 5 and table.type.shape == (2, 3) and table.shape == (5, 2, 3)


def test_lookup_rows_may_be_scalars(pc: ParameterCollection) -> None:
    table = pc.add_lookup_parameters((5,))
    assert table.type.shape == (1,) and table.shape == (5, 1)


def test_names_are_dynets(pc: ParameterCollection) -> None:
    """What dyNET38 answers for the same calls; see docs/dynet_defaults.md."""
    names = [pc.add_parameters(1).name for _ in range(2)]
    names += [pc.add_parameters(1, name="W").name for _ in range(3)]
    names += [pc.add_lookup_parameters((1, 1)).name, pc.add_lookup_parameters((1, 1), name="W").name]
    assert names == ["/_0", "/_1", "/W", "/W_1", "/W_2", "/_2", "/W_3"]
    sub = [pc.add_subcollection(), pc.add_subcollection(), pc.add_subcollection("sub"), pc.add_subcollection("sub")]
    inner = [sub[2].add_subcollection("in"), sub[2].add_subcollection()]
    assert [c.name for c in sub + inner] == ["/_0/", "/_1/", "/sub/", "/sub_1/", "/sub/in/", "/sub/_0/"]
    assert inner[0].add_parameters(1, name="W").name == "/sub/in/W"
    assert ParameterCollection("model").add_subcollection("sub").add_parameters(1, name="W").name == "/model/sub/W"


def test_names_with_underscores_stay_unique(pc: ParameterCollection) -> None:
    names = [pc.add_parameters(1, name=name).name for name in ("W", "W_1", "W", "W_1", "_0", "")]
    assert len(set(names)) == len(names), names


def test_lists_and_counts_cover_subcollections(pc: ParameterCollection) -> None:
    a = pc.add_parameters((2, 3), name="a")
    sub = pc.add_subcollection("sub")
    b = sub.add_parameters(4, name="b")
    table = sub.add_lookup_parameters((5, 2), name="t")
    c = pc.add_parameters(1, name="c")
    assert [p.name for p in pc.parameters_list()] == [a.name, b.name, c.name]
    assert [p.name for p in sub.parameters_list()] == [b.name]
    assert pc.lookup_parameters_list() == [table]
    assert pc.parameter_count() == 6 + 4 + 10 + 1 and sub.parameter_count() == 14
    assert list(sub.named_parameters()) == ["/b", "/t"] and list(pc.named_parameters()) == [
        "/a",
        "/sub/b",
        "/c",
        "/sub/t",
    ]
    assert b.root is pc and sub.root is pc and b.collection is sub


def test_growing_keeps_values_and_gradients_and_moves_views(pc: ParameterCollection) -> None:
    parameters = []
    for i in range(60):
        p = pc.add_parameters((i + 1, 3), init=float(i))
        p.grad[...] = -i
        parameters.append(p)
    for i, p in enumerate(parameters):
        assert (p.data == i).all() and (p.grad == -i).all()
        assert np.shares_memory(p.data, pc.dense_values) and np.shares_memory(p.grad, pc.dense_gradients)
        assert p.data.ctypes.data % 64 == 0 and p.grad.ctypes.data % 64 == 0
        np.testing.assert_array_equal(pc.dense_values[p.offset : p.offset + p.type.size], p.data.ravel())
    assert len(pc.dense_values) == len(pc.dense_gradients)


def test_adding_a_parameter_changes_no_version(pc: ParameterCollection) -> None:
    pc.add_parameters(3)
    version = pc.version
    pc.add_parameters(3)
    assert pc.version == version


def test_segments_follow_collections_and_update_flags(pc: ParameterCollection) -> None:
    a, sub = pc.add_parameters(3), pc.add_subcollection()
    b, c = sub.add_parameters((4, 5)), pc.add_parameters(7, update=False)

    def segments(collection: ParameterCollection, update: bool = True) -> list[tuple[int, int]]:
        return [(int(start), int(stop)) for start, stop in zip(*collection.dense_segments(update), strict=True)]

    spans = {p.name: (p.offset, p.offset + p.type.size) for p in (a, b, c)}
    assert segments(pc) == [spans[a.name], spans[b.name]] and segments(sub) == [spans[b.name]]
    assert segments(pc, update=False) == [spans[c.name]]
    c.set_updated(True)
    b.update = False
    assert segments(pc) == [spans[a.name], spans[c.name]] and segments(sub) == []
    assert c.is_updated() and not b.is_updated()


def test_sparse_gradients_add_up(pc: ParameterCollection) -> None:
    generator = np.random.default_rng(0)
    table = pc.add_lookup_parameters((40, 2, 3))
    expected = np.zeros((40, 3, 2), dtype=np.float32)
    for _ in range(4):
        ids = generator.integers(0, 40, 15)
        rows = generator.standard_normal((15, 3, 2)).astype(np.float32)
        np.add.at(expected, ids, rows)
        table.add_gradient(ids, rows)
        assert set(ids) <= set(table.touched)
    np.testing.assert_array_equal(table.grad_as_array(), expected.transpose(0, 2, 1))
    np.testing.assert_array_equal(table.touched, np.flatnonzero(expected.any((1, 2))))
    table.scale_gradient(0.5)
    np.testing.assert_array_equal(table.grad_as_array(), expected.transpose(0, 2, 1) * np.float32(0.5))
    table.clear_gradient()
    assert not table.grad_as_array().any() and len(table.touched) == 0
    table.add_gradient(np.array([7, 7]), np.ones((2, 3, 2), dtype=np.float32))
    assert table.touched.tolist() == [7] and (table.grad_as_array()[7] == 2).all()


def test_no_rows_are_a_gradient_too(pc: ParameterCollection) -> None:
    table = pc.add_lookup_parameters((4, 2))
    table.add_gradient(np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.float32))
    assert len(table.touched) == 0 and not table.grad_as_array().any()


def test_reset_gradient_clears_everything_below(pc: ParameterCollection) -> None:
    sub = pc.add_subcollection()
    a, b, table = pc.add_parameters(2), sub.add_parameters(2), sub.add_lookup_parameters((3, 2))
    for p in (a, b):
        p.grad[...] = 1
    table.add_gradient(np.array([1]), np.ones((1, 2), dtype=np.float32))
    sub.reset_gradient()
    assert a.grad_as_array().all() and not b.grad_as_array().any() and not table.grad_as_array().any()
    pc.reset_gradient()
    assert not a.grad_as_array().any()


def test_a_parameter_outlives_the_name_of_its_collection() -> None:
    pc = ParameterCollection()
    w = pc.add_parameters(3, init=2.0)
    alive = weakref.ref(pc)
    del pc
    gc.collect()
    assert alive() is w.root and (w.as_array() == 2).all()
    del w
    gc.collect()
    assert alive() is None


def test_the_first_parameter_fixes_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    pc = ParameterCollection()
    monkeypatch.setattr(config, "parameters_exist", False)
    monkeypatch.setattr(config, "dtype", "float64")
    with pytest.raises(ShapeError):
        pc.add_parameters((2, 0))
    assert not config.parameters_exist
    w = pc.add_parameters(3)
    assert config.parameters_exist
    assert pc.dtype == w.data.dtype == w.grad.dtype == np.float64
    monkeypatch.setattr(config, "dtype", "float32")
    assert pc.add_lookup_parameters((2, 2)).data.dtype == np.float64
    other = ParameterCollection()
    assert other.add_lookup_parameters((2, 2)).data.dtype == np.float32
    assert other.add_parameters(2).data.dtype == np.float32


def test_initial_values_follow_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for seed in (3, 3, 4):
        monkeypatch.setattr(config, "_entropy", seed)
        monkeypatch.setattr(config, "_generator", None)
        pc = ParameterCollection()
        drawn.append(
            np.concatenate([pc.add_parameters((4, 5)).as_array(), pc.add_lookup_parameters((3, 5)).as_array()])
        )
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).all()


@pytest.mark.parametrize("value", [np.zeros(4), np.zeros((4, 1)), np.zeros((3, 2)), 1.0])
def test_set_value_refuses_another_shape(pc: ParameterCollection, value: object) -> None:
    w = pc.add_parameters((2, 2), init=1.0, name="W")
    version = pc.version
    with pytest.raises(ShapeError, match=r"/W.*\(2, 2\).*\("):
        w.set_value(value)
    assert (w.as_array() == 1).all() and pc.version == version


def test_lookup_refuses_bad_rows_and_shapes(pc: ParameterCollection) -> None:
    table = pc.add_lookup_parameters((3, 2), init=1.0, name="words")
    for bad in (3, -1):
        with pytest.raises(IndexRangeError, match=rf"/words has 3 rows.*{bad}"):
            table.row_as_array(bad)
        with pytest.raises(IndexRangeError, match="/words"):
            table.rows_as_array([0, bad])
        with pytest.raises(IndexRangeError, match="/words"):
            table.init_row(bad, [1, 2])
        with pytest.raises(IndexRangeError, match=rf"/words has 3 rows.*{bad}"):
            table.add_gradient(np.array([0, bad]), np.ones((2, 2), dtype=np.float32))
    with pytest.raises(ShapeError, match=r"row 1 of /words.*\(2,\).*\(3,\)"):
        table.init_row(1, [1, 2, 3])
    with pytest.raises(ShapeError, match=r"/words.*\(3, 2\).*\(2, 3\)"):
        table.init_from_array(np.zeros((2, 3)))
    with pytest.raises(ShapeError, match="/words"):
        table.add_gradient(np.array([0, 1]), np.ones((1, 2), dtype=np.float32))
    assert (table.as_array() == 1).all() and len(table.touched) == 0 and not table.grad_as_array().any()


@pytest.mark.parametrize("dim", [(2, 0), (-1,), (), 2.5, (2, 1.5), "x", None])
def test_bad_shapes_are_refused_and_leave_no_trace(pc: ParameterCollection, dim: object) -> None:
    with pytest.raises(ShapeError, match="/W"):
        pc.add_parameters(dim, name="W")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="/W"):
        pc.add_lookup_parameters((0, dim), name="W")  # type: ignore[arg-type]
    assert pc.parameters_list() == [] and pc.lookup_parameters_list() == []
    assert pc.add_parameters(2, name="W").name == "/W", "a refused parameter does not take the name"


@pytest.mark.parametrize("name", ["a/b", "/", 3])
def test_bad_names_are_refused(pc: ParameterCollection, name: object) -> None:
    for add in (
        lambda: pc.add_parameters(2, name=name),  # type: ignore[arg-type]
        lambda: pc.add_lookup_parameters((2, 2), name=name),  # type: ignore[arg-type]
        lambda: pc.add_subcollection(name),  # type: ignore[arg-type]
        lambda: ParameterCollection(name),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigurationError, match="slash"):
            add()


def test_too_large_parameters_say_how_much_they_want(pc: ParameterCollection) -> None:
    with pytest.raises(OutOfMemoryError, match=r"/words of shape \(1000000000, 1000000\) wants .* GiB"):
        pc.add_lookup_parameters((10**9, 10**6), name="words")
    assert pc.lookup_parameters_list() == []
    assert pc.add_lookup_parameters((2, 2), name="words").name == "/words"


def test_constants_follow_their_parameter(pc: ParameterCollection) -> None:
    w, table = pc.add_parameters((2, 3), init=1.0), pc.add_lookup_parameters((4, 2), init=1.0)
    for p in (w, table):
        constant = p.constant
        assert constant is p.constant is constant.constant and constant is not p
        assert (constant.type, constant.shape, constant.name, constant.root) == (p.type, p.shape, p.name, pc)
        assert constant.is_lookup == p.is_lookup and not constant.update and p.update
        p.scale(2)
        pc.add_parameters((40, 40))
        assert (constant.data == 2).all() and (constant.npvalue() == 2).all()
    assert table.constant.size == 4


def test_weight_decay_has_bounds(pc: ParameterCollection) -> None:
    assert pc.get_weight_decay() == 0
    pc.set_weight_decay_lambda(0.25)
    assert pc.get_weight_decay() == pc.add_subcollection().get_weight_decay() == 0.25
    for bad in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigurationError, match="weight decay"):
            pc.set_weight_decay_lambda(bad)
    assert pc.get_weight_decay() == 0.25
