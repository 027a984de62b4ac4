# C types of `arithmetic.py`.

from dynbatch.ops.record cimport Op

cdef Op _add, _subtract, _cmult, _cdiv, _pow, _rsubtract, _rdivide, _times_matrix, _bmax, _bmin, _negate, _exp, _log, _sqrt, _square, _absolute, _tanh, _logistic, _rectify, _gelu, _softsign, _log_sigmoid, _nobackprop, _flip_gradient, _elu, _silu, _scale_gradient
