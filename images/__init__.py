"""The container images of Moonpool: their Containerfiles, and a builder that needs no Docker."""
