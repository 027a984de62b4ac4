# C types of `recorder.py`.

cimport cython

from dynbatch.graph cimport Expression, Graph
from dynbatch.signature cimport Signature
from dynbatch.watch cimport Watch


@cython.final
cdef class Recorder:
    cdef readonly object bound_cell
    cdef public Form form
    cdef public object __name__
    cdef public object __doc__
    cdef object _slow


@cython.final
cdef class Form:
    cdef Signature signature
    cdef bint returns
    cdef tuple types
    cdef tuple equal_lists
    cdef Watch watch
    cdef object rest
    cdef object holds
    cdef bytes kinds
    cdef tuple keys
    cdef Py_ssize_t count
    cdef Py_ssize_t words
    cdef tuple values
    cdef tuple lists
    cdef tuple ints
    cdef tuple floats
    cdef object dtype

    cdef bint is_current(self) except -1
    @cython.locals(i=Py_ssize_t, kind=Py_ssize_t, kinds=bytes, keys=tuple, e=Expression)
    cdef bint fits(self, tuple args, Graph graph) except -1
    @cython.locals(i=Py_ssize_t, at=Py_ssize_t, count=Py_ssize_t, words=cython.p_longlong, e=Expression)
    cdef record(self, tuple args, Graph graph)
