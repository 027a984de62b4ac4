# C types of `signature.py`.


cdef class Signature:
    cdef object __weakref__
    cdef readonly object program
    cdef readonly tuple binding
    cdef readonly tuple roots
    cdef readonly tuple tail
    cdef readonly tuple bounds
    cdef readonly tuple types
    cdef readonly object type
    cdef public tuple place
    cdef readonly dict cache
    cdef readonly list equal_lists
