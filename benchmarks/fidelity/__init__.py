"""How near each posterior is to the true one, sampled by HMC: tasks, contenders, measures."""
