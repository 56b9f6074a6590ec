"""All thresholds of the doctor with their reasons; docs/doctor.md repeats them."""

# A weight within this KL of its prior has learned nothing: σ within 10 % of the prior's and the mean within 0.14 prior
# standard deviations. A hundred such weights together hold less than one nat.
COLLAPSED_NATS = 0.01
# From this fraction of collapsed weights on, a layer passes on mostly noise of the prior.
COLLAPSED_FRACTION = 0.9

# A data_size wrong by this factor means another posterior: its effective temperature is off by the same factor.
DATA_SIZE_ALARM = 2.0
# A tenth more or less changes a posterior by less than its other choices do.
DATA_SIZE_WARNING = 1.1

# Inputs have standard deviation 1 once they are scaled; usual initial weights and priors are made for that. Bytes, ages
# and years lie beyond, digits between 0 and 1 (0.3) do not.
INPUT_STD = (0.2, 5.0)
# Mean of the inputs over their standard deviation: 0 if scaled, 0.4 for black and white digits, 1.9 for photographs in
# [0, 1], on which LeNet-5 loses several percent of accuracy by it.
INPUT_OFFSET = 1.0

# N examples that count like N/10: published recipes cool posteriors, they do not heat them.
TEMPERATURE_ALARM = 10.0
TEMPERATURE_WARNING = 1.5

# Fraction of a constant prediction's error that is removed on training data. Below one half training failed, unless the
# data are too noisy: then the network still clearly beats the constant, and no baseline is better.
LEARNED_LITTLE = 0.5
LEARNED_WELL = 0.9

# Worse than a constant by this many nats (40 % less probability for every target): a network that learned nothing is
# within a tenth of a nat.
CONSTANT_NATS = 0.5
# RMSE over the root mean square of the targets: about 1 for an untrained network, whose outputs are near 0; far larger
# after divergence.
DIVERGED_RMSE = 2.0

# Running statistics over the last ~20 batches vary by a few hundredths of a standard deviation, and healthy networks
# show at most 0.1; a quarter is beyond that.
STATISTICS_SHIFT = 0.25
# Differences that matter: this fraction of the NLL and this many nats, or this error rate (fraction of the MSE).
GAIN_FRACTION = 0.1
GAIN_NATS = 0.05
GAIN_ERROR = 0.01

# Cost and pull of a wider σ are equal at the optimum and the cost grows with σ²: a ratio of 10 is a σ three times too
# large, one of 0.01 a σ ten times too small. Adam moves ρ by about lr a step, so that healthy classifiers trained for a
# few hundred steps lie between 0.005 and 1.5; those that work badly lie above 10.
NOISE_TOO_LARGE = 10.0
NOISE_TOO_SMALL = 0.01
# Between these σ is near its optimum; classifiers trained to convergence had 0.7 to 1.3.
NOISE_BALANCED = (0.3, 3.0)
# Median |μ|/σ. Below 1 a typical weight is more noise than signal, which trained networks tolerate (most of their
# weights do not matter). In a network that has learned nothing it is the likely reason, and certainly below one half.
LOW_SNR = 1.0
# Fraction of the predictive uncertainty that draws contribute. A thousandth is invisible in any prediction; healthy
# Bayes by Backprop on 1,438 digits has 5 % and more.
EPISTEMIC_NONE = 0.001
EPISTEMIC_LITTLE = 0.01

# Observed over expected NLL, or mean z²: off by half, with the whole interval beyond, and enough nats to matter.
SURPRISE = 1.5
SURPRISE_NATS = 0.1
# Mean z² on training data off by 4: the noise's standard deviation is wrong by a factor of 2.
NOISE_LEVEL = 4.0

# Held-out NLL lost by the prior precision that the evidence prefers, and `GAIN_FRACTION` of it: less is within what
# another network of the same training would change.
PRIOR_NATS = 0.01

# Tolerated Monte-Carlo errors: 5 % of the NLL (at least 0.005 nats), 0.02 of a probability.
DRAWS_NLL_FRACTION = 0.05
DRAWS_NLL_FLOOR = 0.005
DRAWS_PROBABILITY = 0.02
# A mean that is off by a tenth of the predictive standard deviation adds 1 % to its square.
DRAWS_VALUE = 0.1
DRAWS_MOST = 1024
# Twice the tolerated error needs four times the draws.
DRAWS_WARNING = 4

# Gradient variance from weight draws over that from batches: nine tenths of a step's noise come from the draws.
GRADIENT_RATIO = 10.0
# Norm of the mean gradient over the noise of one step: the mean of four steps is as large as its noise.
GRADIENT_CLEAR = 0.5

# An NLL that still fell by this fraction over the last quarter of training had not converged.
STILL_FALLING = 0.05
STILL_FALLING_FAST = 0.2
# A learning rate this many times the method's default, or smaller by as much, is the first thing to change.
RATE_FAR = 10.0
# NLL of the first epoch over that of a constant prediction (and over one nat): usual initial weights have about 1.
FIRST_EPOCH = 2.0
# Accuracy minus mean confidence: a calibrated classifier has 0, a trained one rarely more than a few hundredths.
STILL_UNSURE = 0.1
# Mean entropy over log(classes): predictions this close to uniform leave draws nothing to disagree about.
ENTROPY_FULL = 0.8
# A σ this close to the advised one causes nothing.
STD_NEAR = 1.5
# Below this fraction of the uncertainty, underconfidence does not come from the draws.
EPISTEMIC_MINOR = 0.5

# Difference of AUROCs: one OOD input in a hundred changes sides. A smaller one is not worth a pass over training data.
DETECTION_GAIN = 0.01
# Noise that is no input of any data set: ten times the standard deviation of the inputs. A mean confidence of 0.9 there
# is that of a network which knows; one that doubts has little more than 1/classes.
FAR_STDS = 10.0
FAR_CONFIDENCE = 0.9
# Largest split-R̂ of 100 rows' predictions. Chains that agree have up to 1.01 for one quantity, and some more for the
# largest of hundreds; at 1.2 means of chains differ by more than half of their standard deviation.
RHAT_WARNING = 1.05
RHAT_ALARM = 1.2
# Effective samples with which a standard deviation is known to a tenth.
ESS_LEAST = 50.0
