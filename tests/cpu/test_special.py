"""Scalar functions that vectorize, against the library's."""

from __future__ import annotations

import math

import numba
import numpy as np

from dynbatch.cpu.special import erf32


@numba.njit(error_model="numpy")
def erf_of(x, y):
    for i in range(x.size):
        y[i] = erf32(x[i])


def test_erf_is_right_to_the_last_bits_and_exactly_one_where_it_rounds_to_that():
    x = np.r_[np.linspace(-6, 6, 200_001), 1e-30, 1e-7, np.inf, -np.inf].astype(np.float32)
    y = np.empty_like(x)
    erf_of(x, y)
    expected = np.array([math.erf(v) for v in x.tolist()])
    np.testing.assert_allclose(y, expected, rtol=5e-7)
    assert (y[x > 4] == 1).all() and (y[x < -4] == -1).all()
    erf_of(x[:1] * np.float32(np.nan), y[:1])
    assert np.isnan(y[0])
