"""Last import of multiprocessing's fork server: the collector leaves alone what was imported.

Otherwise each fork's collector goes through torch's million objects, and copies their pages.
"""

import gc

from tests.harness.compile_kernels import load_all
from tests.harness.processes.huge_pages import use_huge_pages

load_all()
gc.collect()
gc.freeze()
gc.enable()
use_huge_pages()
