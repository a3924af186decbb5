"""How our own files are served: under names that hold their content's hash, so a browser may keep them for ever."""

from whitenoise.storage import CompressedManifestStaticFilesStorage

IMPORT = r"""(?m)^(?P<matched>import (?P<what>[^"';]+) from "(?P<url>\.[^"]+)";)"""


class Assets(CompressedManifestStaticFilesStorage):
    """Our modules import each other by the hashed names too, else an upgrade would mix old modules with new ones.

    Django can do that for every script, but then stumbles over comments in those of other packages.
    """

    patterns = (
        *CompressedManifestStaticFilesStorage.patterns,
        ("js/*.js", ((IMPORT, 'import %(what)s from "%(url)s";'),)),
    )
