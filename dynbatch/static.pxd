# C types of `static.py`.

cimport cython

from dynbatch.graph cimport Expression, Graph
from dynbatch.words cimport Words


@cython.final
cdef class Tape:
    cdef Py_ssize_t inputs
    cdef long long values
    cdef Py_ssize_t size
    cdef Words words
    cdef Words moves
    cdef readonly list signatures
    cdef readonly object floats
    cdef readonly object data
    cdef object lanes
    cdef object skips
    cdef list phases
    cdef object result
    cdef list _signature_at
    cdef list _input_at
    cdef list _data_at
    cdef list _key_at
    cdef list _indices

    cdef _find_places(self, object stream)
    cpdef list _plain_words(self)
    @cython.locals(base=object, start=Py_ssize_t, at=Py_ssize_t, number=Py_ssize_t, i=Py_ssize_t, words=Words, e=Expression)
    cpdef replay(self, Graph graph, list inputs)
    @cython.locals(at=Py_ssize_t, number=Py_ssize_t)
    cdef _take_indices(self, Graph graph)


cdef _moved(object result, Graph graph, long long base, list inputs)
