"""What records: the recorder, the table of live storages, the tracker of every storage, and the samplers of a process."""
