"""The backends: one file or package for each way to bring a job's processes to life.

A backend is a class without arguments that follows `msrun.backend.Launcher`: `plan`
decides and returns data, `submit` acts on it.  None knows another.  A backend of this
distribution is named in `msrun.backend.BUILT_IN`; those of others register under the
entry-point group `msrun.launchers`.
"""
