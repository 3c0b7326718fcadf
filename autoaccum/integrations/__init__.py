"""Every framework: its Trainers as workloads, exact accumulation within its loops, and its arguments for a plan."""
