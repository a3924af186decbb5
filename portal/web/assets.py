"""How our own files are served: under names that hold their content's hash, so that a browser may keep them for ever."""

from whitenoise.storage import CompressedManifestStaticFilesStorage


class Assets(CompressedManifestStaticFilesStorage):
    # A module imports the other ones by their hashed names too, else an upgrade would mix old modules with new ones.
    support_js_module_import_aggregation = True
