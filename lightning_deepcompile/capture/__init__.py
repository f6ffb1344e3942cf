"""The compiler backend: turns Dynamo's graphs into executables. It makes neither shards nor plans."""
