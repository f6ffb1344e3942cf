"""Uses of private parts of PyTorch, Lightning and Transformers, in one file for each neighbour.

Differences between PyTorch 2.11 and 2.15 are handled there. Each function has a test that fails when the neighbour
changes what the function uses. Nothing here knows of parameters, programs or plans. Modules whose neighbours are large
(`lightning`, `checkpoint`, `fsdp`) or may be missing (`transformers`) are imported by themselves.
"""

from lightning_deepcompile.compat.allocator import *
from lightning_deepcompile.compat.aot import *
from lightning_deepcompile.compat.autograd import *
from lightning_deepcompile.compat.distributed import *
from lightning_deepcompile.compat.dynamo import *
from lightning_deepcompile.compat.fx import *
from lightning_deepcompile.compat.inductor import *
from lightning_deepcompile.compat.modules import *
from lightning_deepcompile.compat.optim import *
