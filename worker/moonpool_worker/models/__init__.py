"""Model families: one file each, over the kernels' interface and the paged arena."""
