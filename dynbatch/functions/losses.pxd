# C types of `losses.py`.

cimport cython

from dynbatch.graph cimport Expression
from dynbatch.ops.record cimport Op

cdef Op _softmax, _log_softmax, _pickneglogsoftmax, _hinge
