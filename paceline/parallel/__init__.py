"""Model parallelism: a model divided over the ranks along the mesh's other axes than `data`."""
