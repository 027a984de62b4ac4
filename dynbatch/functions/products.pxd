# C types of `products.py`.

from dynbatch.ops.record cimport Op

cdef Op _transpose, _dot_product, _affine
