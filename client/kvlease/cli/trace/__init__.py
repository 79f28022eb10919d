"""The command `kvlease trace`: to record a cache's requests, to replay them, and to simulate policies."""
