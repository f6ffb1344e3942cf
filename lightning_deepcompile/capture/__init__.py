"""The compiler backend: Dynamo's graphs in, executables out; shards are made elsewhere, and no plan is made here."""
