"""The spans of calls and copies, if the settings ask for any: what they say, and where they are sent or written."""
