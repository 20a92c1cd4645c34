"""The test kit: that a function on a mesh equals the same function on one process. Needs Hypothesis.

:func:`assert_equivalent` runs a function on each of several meshes and on one process, and says which output or
gradient differs and by what factor. The strategies draw what the function must not depend on::

    @given(mesh=meshes(), placed=any_placements(PARAMS))
    def test_loss(mesh, placed):
        assert_equivalent(loss, PARAMS, placed, [mesh])
"""

from ._equivalence import MESHES as MESHES
from ._equivalence import assert_equivalent as assert_equivalent
from ._strategies import any_placements as any_placements
from ._strategies import meshes as meshes
from ._strategies import uneven_shapes as uneven_shapes
