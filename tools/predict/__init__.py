"""What a job would take elsewhere: on another network, faster or slower devices, other numbers of ranks."""
