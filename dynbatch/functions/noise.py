"""Layer normalization, random numbers, dropout and noise."""

from __future__ import annotations

from typing import Any

from dynbatch.compiler.trace import Tracer
from dynbatch.errors import user_line
from dynbatch.functions.arguments import Dim, dims_of
from dynbatch.graph import Expression
from dynbatch.ops import elementwise as ew
from dynbatch.ops import normalization, random
from dynbatch.ops.record import (
    Op,
    as_operand,
)


def _emit_layer_norm(t: Tracer, x: int, gain: int, bias: int) -> int:
    normalized = t.emit(normalization.normalize, x, eps=1e-12)
    return t.emit(ew.add, t.emit(ew.cmult, normalized, gain), bias)


def _draw(primitive: Any, t: Tracer, dims: tuple[int, ...], like: int | None = None) -> int:
    return t.emit(primitive, t.random_key(like), shape=dims, salt=t.salt(), dtype=t.dtype)


def _emit_affine_draw(primitive: Any, t: Tracer, low: int, scale: int, dims: tuple[int, ...]) -> int:
    return t.emit(ew.add, t.emit(ew.cmult, _draw(primitive, t, dims), scale), low)


def _emit_dropout(t: Tracer, x: int, rate: int) -> int:
    kept = t.emit(ew.subtract, t.constant(1.0), rate)
    mask = t.emit(ew.less, _draw(random.uniform, t, t.type(x).shape, x), kept)
    return t.emit(ew.cmult, x, t.emit(ew.cdiv, mask, kept))


def _emit_bernoulli(t: Tracer, p: int, scale: int, dims: tuple[int, ...]) -> int:
    return t.emit(ew.cmult, t.emit(ew.less, _draw(random.uniform, t, dims), p), scale)


def _emit_gumbel(t: Tracer, mu: int, beta: int, dims: tuple[int, ...]) -> int:
    return t.emit(ew.add, t.emit(ew.cmult, t.emit(ew.gumbel, _draw(random.uniform, t, dims)), beta), mu)


_layer_norm = Op("layer_norm", _emit_layer_norm)
_random_normal = Op("random_normal", lambda t, m, s, dims: _emit_affine_draw(random.normal, t, m, s, dims))
_random_uniform = Op("random_uniform", lambda t, m, s, dims: _emit_affine_draw(random.uniform, t, m, s, dims))
_random_bernoulli = Op("random_bernoulli", _emit_bernoulli)
_random_gumbel = Op("random_gumbel", _emit_gumbel)
_dropout = Op("dropout", _emit_dropout)
_noise = Op(
    "noise",
    lambda t, x, s: t.emit(ew.add, x, t.emit(ew.cmult, _draw(random.normal, t, t.type(x).shape, x), s)),
)


def layer_norm(x: Any, g: Any, b: Any) -> Expression:
    """``g * (x - mean) / deviation + b`` over the first dimension (Ba, Kiros and Hinton 2016), for each column.

    The variance is that of the elements (divided by their number), with 1e-12 added.
    """
    return _layer_norm([as_operand(o) for o in (x, g, b)])


def random_normal(dim: Dim, mean: float = 0.0, stddev: float = 1.0) -> Expression:
    """Normally distributed numbers, drawn for each node (see `init` for the seed)."""
    return _random_normal((), (), (mean, stddev), (dims_of("random_normal", dim),))


def random_uniform(dim: Dim, left: float = 0.0, right: float = 1.0) -> Expression:
    """Uniformly distributed numbers between ``left`` and ``right``."""
    return _random_uniform((), (), (left, right - left), (dims_of("random_uniform", dim),))


def random_bernoulli(dim: Dim, p: float, scale: float = 1.0) -> Expression:
    """``scale`` with probability ``p``, else zero."""
    return _random_bernoulli((), (), (p, scale), (dims_of("random_bernoulli", dim),))


def random_gumbel(dim: Dim, mu: float = 0.0, beta: float = 1.0) -> Expression:
    """Numbers from the Gumbel distribution."""
    return _random_gumbel((), (), (mu, beta), (dims_of("random_gumbel", dim),))


def dropout(x: Any, p: float) -> Expression:
    """Each element is zero with probability ``p``, else divided by ``1 - p``; the rate is payload."""
    if not getattr(p, "is_payload", False) and not 0 <= p < 1:
        raise ValueError(f"{user_line()}: dropout: the rate must be at least 0 and below 1, not {p}")
    return _dropout((as_operand(x),), (), (p,))


def noise(x: Any, std: float) -> Expression:
    """``x`` plus normal noise with deviation ``std``."""
    return _noise((as_operand(x),), (), (std,))
