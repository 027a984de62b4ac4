# C types of `watch.pyx`.

from cpython.object cimport PyObject


cdef struct Field:
    Py_ssize_t owner
    PyObject *name
    PyObject *value
    Py_ssize_t place


cdef class Watch:
    cdef tuple facts
    cdef list owners
    cdef list types
    cdef unsigned int *versions
    cdef Field *fields
    cdef Py_ssize_t count

    cpdef bint unchanged(self) except -1
    cdef bint _look(self) except -1
