// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * SIMULATED driver "nvidia" for the guest's simulated cards: there is no code of NVIDIA's in it, and it drives nothing.
 *
 * It has what the sysfs of a machine with vGPUs shows, in the three ways of NVIDIA's manager: mediated devices on a card
 * or on its virtual functions (vgpu=mdev), or a type that is written into a virtual function (vgpu=vendor). Its device
 * files are those of NVIDIA's driver. MIG and vGPUs of several sizes are set in the folder "simulated" of a card, and are
 * forgotten when its virtual functions are enabled. While a device file is open, unbinding the card waits, for ever, as
 * NVIDIA's does. In /proc a card has the lines of the real driver's file "information"; its UUID, made of its bus, is
 * there after its first use.
 */
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/mdev.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <linux/vfio.h>
#include <linux/wait.h>

#define VERSION "580.178.04"
#define MAJOR_NUMBER 195
#define MOST 16
#define TYPES 4
#define MEMORY_GB 24
#define MIG_OFF -1

static char *vgpu = "none";
module_param(vgpu, charp, 0444);
MODULE_PARM_DESC(vgpu, "none, mdev, or vendor");
static char *kept = "";
module_param(kept, charp, 0644);
MODULE_PARM_DESC(kept, "address of a card in persistence mode: unbinding it waits, although no process has it open");

/* Of an A10, with their numbers in one release of the manager; the last one needs a GPU instance, which no A10 has. */
static const struct {
	unsigned int id;
	const char *name;
	unsigned int most, gb;
	bool mig;
} types[TYPES] = {
	{ 590, "NVIDIA A10-4Q", 6, 4 },
	{ 592, "NVIDIA A10-12Q", 2, 12 },
	{ 593, "NVIDIA A10-24Q", 1, 24 },
	{ 700, "NVIDIA A10-1-6C", 4, 6, true },
};

struct card {
	struct pci_dev *pci;
	int minor;
	/* Its UUID is known. */
	bool used_before;
	atomic_t users;
	struct mutex lock;
	/* Unless they may be mixed, all vGPUs of a card are of one type. */
	bool mixed;
	/* The number of GPU instances, or MIG_OFF. */
	int mig;
	unsigned int used[TYPES];
};

struct offered {
	struct mdev_type type;
	struct place *place;
	int index;
	char name[8];
};

/* Where vGPUs are made: a card without virtual functions, or one of them. */
struct place {
	struct card *card;
	struct mdev_parent parent;
	bool is_parent;
	int current_type;
	struct mdev_type *list[TYPES];
	struct offered offered[TYPES];
};

static struct card *cards[MOST];
static DECLARE_WAIT_QUEUE_HEAD(closed);

static bool is(const char *framework)
{
	return !strcmp(vgpu, framework);
}

static unsigned int used(struct card *card)
{
	unsigned int i, sum = 0;

	for (i = 0; i < TYPES; i++)
		sum += card->used[i];
	return sum;
}

/* How many more vGPUs of a type the card takes. */
static unsigned int room(struct card *card, int type)
{
	unsigned int i, gb = 0;

	if (types[type].mig != (card->mig != MIG_OFF))
		return 0;
	if (types[type].mig)
		return card->mig - card->used[type];
	for (i = 0; i < TYPES; i++) {
		if (card->used[i] && i != type && !card->mixed)
			return 0;
		gb += card->used[i] * types[i].gb;
	}
	return (MEMORY_GB - gb) / types[type].gb;
}

/* Reserve room for a vGPU on the card, or give it back. */
static int reserve(struct card *card, int type)
{
	int error = 0;

	mutex_lock(&card->lock);
	if (room(card, type))
		card->used[type]++;
	else
		error = -ENOSPC;
	mutex_unlock(&card->lock);
	return error;
}

static void release(struct card *card, int type)
{
	mutex_lock(&card->lock);
	card->used[type]--;
	mutex_unlock(&card->lock);
}

/* ---- mediated devices */

struct slice {
	struct vfio_device vfio;
};

static int slice_init(struct vfio_device *vfio)
{
	return 0;
}

static void slice_release(struct vfio_device *vfio)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
	vfio_free_device(vfio);
#endif
}

static int slice_open(struct vfio_device *vfio)
{
	return 0;
}

static void slice_close(struct vfio_device *vfio)
{
}

static const struct vfio_device_ops slice_ops = {
	.name = "nvidia-vgpu-simulated",
	.init = slice_init,
	.release = slice_release,
	.open_device = slice_open,
	.close_device = slice_close,
};

static struct offered *offer(struct mdev_type *type)
{
	return container_of(type, struct offered, type);
}

static int mdev_probe(struct mdev_device *mdev)
{
	struct offered *offered = offer(mdev->type);
	struct slice *slice;
	int error;

	/* A virtual function takes one. */
	if (offered->place->card->pci->is_physfn && offered->place->current_type >= 0)
		return -ENOSPC;
	error = reserve(offered->place->card, offered->index);
	if (error)
		return error;
	slice = vfio_alloc_device(slice, vfio, &mdev->dev, &slice_ops);
	if (IS_ERR(slice)) {
		release(offered->place->card, offered->index);
		return PTR_ERR(slice);
	}
	error = vfio_register_emulated_iommu_dev(&slice->vfio);
	if (error) {
		vfio_put_device(&slice->vfio);
		release(offered->place->card, offered->index);
		return error;
	}
	offered->place->current_type = offered->index;
	dev_set_drvdata(&mdev->dev, slice);
	return 0;
}

static void mdev_removed(struct mdev_device *mdev)
{
	struct slice *slice = dev_get_drvdata(&mdev->dev);
	struct offered *offered = offer(mdev->type);

	vfio_unregister_group_dev(&slice->vfio);
	vfio_put_device(&slice->vfio);
	offered->place->current_type = -1;
	release(offered->place->card, offered->index);
}

static unsigned int mdev_available(struct mdev_type *type)
{
	struct offered *offered = offer(type);

	if (offered->place->card->pci->is_physfn && offered->place->current_type >= 0)
		return 0;
	return room(offered->place->card, offered->index);
}

static ssize_t mdev_description(struct mdev_type *type, char *buffer)
{
	return sysfs_emit(buffer, "num_heads=4, max_resolution=7680x4320, max_instance=%u\n", types[offer(type)->index].most);
}

static struct mdev_driver mdev_driver = {
	.device_api = VFIO_DEVICE_API_PCI_STRING,
	.driver = { .name = "nvidia-vgpu-vfio", .owner = THIS_MODULE, .mod_name = KBUILD_MODNAME },
	.probe = mdev_probe,
	.remove = mdev_removed,
	.get_available = mdev_available,
	.show_description = mdev_description,
};

static int be_parent(struct place *place, struct device *device)
{
	int i, error;

	for (i = 0; i < TYPES; i++) {
		struct offered *offered = &place->offered[i];

		offered->place = place;
		offered->index = i;
		snprintf(offered->name, sizeof(offered->name), "%u", types[i].id);
		offered->type.sysfs_name = offered->name;
		offered->type.pretty_name = types[i].name;
		place->list[i] = &offered->type;
	}
	error = mdev_register_parent(&place->parent, device, &mdev_driver, place->list, TYPES);
	place->is_parent = !error;
	return error;
}

/* ---- a type that is written into a virtual function */

static ssize_t creatable_vgpu_types_show(struct device *device, struct device_attribute *attribute, char *buffer)
{
	struct place *place = dev_get_drvdata(device);
	int i, length = sysfs_emit(buffer, "ID    : vGPU Name\n");

	for (i = 0; i < TYPES && place->current_type < 0; i++)
		if (room(place->card, i))
			length += sysfs_emit_at(buffer, length, "%-5u : %s\n", types[i].id, types[i].name);
	return length;
}
static DEVICE_ATTR_RO(creatable_vgpu_types);

static ssize_t current_vgpu_type_show(struct device *device, struct device_attribute *attribute, char *buffer)
{
	struct place *place = dev_get_drvdata(device);

	return sysfs_emit(buffer, "%u\n", place->current_type < 0 ? 0 : types[place->current_type].id);
}

static ssize_t current_vgpu_type_store(struct device *device, struct device_attribute *attribute, const char *buffer,
				       size_t size)
{
	struct place *place = dev_get_drvdata(device);
	unsigned int id;
	int i, error;

	if (kstrtouint(buffer, 0, &id))
		return -EINVAL;
	if (!id) {
		if (place->current_type >= 0)
			release(place->card, place->current_type);
		place->current_type = -1;
		return size;
	}
	if (place->current_type >= 0)
		return -EBUSY;
	for (i = 0; i < TYPES; i++) {
		if (types[i].id != id)
			continue;
		error = reserve(place->card, i);
		if (error)
			return error;
		place->current_type = i;
		return size;
	}
	return -EINVAL;
}
static DEVICE_ATTR_RW(current_vgpu_type);

static struct attribute *vendor_attributes[] = {
	&dev_attr_creatable_vgpu_types.attr,
	&dev_attr_current_vgpu_type.attr,
	NULL,
};
static const struct attribute_group vendor_group = { .name = "nvidia", .attrs = vendor_attributes };

/* ---- what nvidia-smi sets: lab/guest/tools/nvidia-smi writes here */

static struct card *card_of(struct device *device)
{
	struct place *place = dev_get_drvdata(device);

	return place->card;
}

static int set_unused(struct device *device, const char *buffer, int lowest, int *value)
{
	int error = kstrtoint(buffer, 0, value);

	if (error)
		return error;
	if (*value < lowest || *value > (int)types[TYPES - 1].most)
		return -EINVAL;
	return used(card_of(device)) ? -EBUSY : 0;
}

static ssize_t mig_show(struct device *device, struct device_attribute *attribute, char *buffer)
{
	return sysfs_emit(buffer, "%d\n", card_of(device)->mig);
}

static ssize_t mig_store(struct device *device, struct device_attribute *attribute, const char *buffer, size_t size)
{
	int value, error = set_unused(device, buffer, MIG_OFF, &value);

	if (error)
		return error;
	card_of(device)->mig = value;
	return size;
}
static DEVICE_ATTR_RW(mig);

static ssize_t mixed_show(struct device *device, struct device_attribute *attribute, char *buffer)
{
	return sysfs_emit(buffer, "%d\n", card_of(device)->mixed);
}

static ssize_t mixed_store(struct device *device, struct device_attribute *attribute, const char *buffer, size_t size)
{
	int value, error = set_unused(device, buffer, 0, &value);

	if (error)
		return error;
	card_of(device)->mixed = value;
	return size;
}
static DEVICE_ATTR_RW(mixed);

static struct attribute *set_attributes[] = {
	&dev_attr_mig.attr,
	&dev_attr_mixed.attr,
	NULL,
};
static const struct attribute_group set_group = { .name = "simulated", .attrs = set_attributes };

/* ---- cards */

static int probe_place(struct pci_dev *pci, struct card *card, struct place **made)
{
	struct place *place = kzalloc(sizeof(*place), GFP_KERNEL);
	int error = 0;

	if (!place)
		return -ENOMEM;
	place->card = card;
	place->current_type = -1;
	*made = place;
	pci_set_drvdata(pci, place);
	if (is("mdev") && (pci->is_virtfn || !pci_sriov_get_totalvfs(pci)))
		error = be_parent(place, &pci->dev);
	else if (is("vendor") && pci->is_virtfn)
		error = sysfs_create_group(&pci->dev.kobj, &vendor_group);
	if (error)
		kfree(place);
	return error;
}

static int show_information(struct seq_file *file, void *unused)
{
	struct card *card = file->private;

	seq_puts(file, "Model: \t\t NVIDIA A10 (SIMULATED)\n");
	seq_printf(file, "IRQ:   \t\t %u\n", card->pci->irq);
	if (card->used_before)
		seq_printf(file, "GPU UUID: \t GPU-51d00000-0000-4000-8000-%08x%04x\n", pci_domain_nr(card->pci->bus),
			   pci_dev_id(card->pci));
	else
		seq_puts(file, "GPU UUID: \t GPU-????????-????-????-????-????????????\n");
	seq_puts(file, "Video BIOS: \t ??.??.??.??.??\nBus Type: \t PCIe\nDMA Size: \t 47 bits\n");
	seq_puts(file, "DMA Mask: \t 0x7fffffffffff\n");
	seq_printf(file, "Bus Location: \t %s\nDevice Minor: \t %d\n", pci_name(card->pci), card->minor);
	seq_puts(file, "GPU Firmware: \t " VERSION "\nGPU Excluded:\t No\n");
	return 0;
}

static void folder_of(struct card *card, char *path, size_t size)
{
	snprintf(path, size, "driver/nvidia/gpus/%s", pci_name(card->pci));
}

static int show(struct card *card)
{
	char path[64];
	struct proc_dir_entry *folder;

	folder_of(card, path, sizeof(path));
	folder = proc_mkdir(path, NULL);
	return folder && proc_create_single_data("information", 0444, folder, show_information, card) ? 0 : -ENOMEM;
}

static void hide(struct card *card)
{
	char path[64];

	folder_of(card, path, sizeof(path));
	remove_proc_subtree(path, NULL);
}

static int probe(struct pci_dev *pci, const struct pci_device_id *id)
{
	struct place *place;
	struct card *card;
	int minor, error;

	if (pci->is_virtfn) {
		struct place *owner = pci_get_drvdata(pci_physfn(pci));

		if (pci_physfn(pci)->dev.driver != pci->dev.driver || !owner)
			return -ENODEV;
		return probe_place(pci, owner->card, &place);
	}
	for (minor = 0; minor < MOST && cards[minor]; minor++)
		;
	card = minor < MOST ? kzalloc(sizeof(*card), GFP_KERNEL) : NULL;
	if (!card)
		return -ENOMEM;
	card->pci = pci;
	card->minor = minor;
	card->mig = MIG_OFF;
	mutex_init(&card->lock);
	error = sysfs_create_group(&pci->dev.kobj, &set_group);
	if (error)
		goto no_group;
	error = show(card);
	if (!error)
		error = probe_place(pci, card, &place);
	if (error)
		goto no_place;
	cards[minor] = card;
	return 0;
no_place:
	hide(card);
	sysfs_remove_group(&pci->dev.kobj, &set_group);
no_group:
	kfree(card);
	return error;
}

static bool is_free(struct card *card)
{
	return !atomic_read(&card->users) && strncmp(kept, pci_name(card->pci), strlen(pci_name(card->pci)));
}

static void removed(struct pci_dev *pci)
{
	struct place *place = pci_get_drvdata(pci);
	struct card *card = place->card;

	if (pci->is_virtfn) {
		if (place->is_parent)
			mdev_unregister_parent(&place->parent);
		if (is("vendor"))
			sysfs_remove_group(&pci->dev.kobj, &vendor_group);
		if (place->current_type >= 0)
			release(card, place->current_type);
		kfree(place);
		return;
	}
	while (!wait_event_timeout(closed, is_free(card), HZ / 5))
		;
	pci_disable_sriov(pci);
	if (place->is_parent)
		mdev_unregister_parent(&place->parent);
	sysfs_remove_group(&pci->dev.kobj, &set_group);
	cards[card->minor] = NULL;
	hide(card);
	kfree(place);
	kfree(card);
}

static int set_vfs(struct pci_dev *pci, int wanted)
{
	struct card *card = card_of(&pci->dev);
	int error;

	/* NVIDIA's driver begins anew, too. */
	card->mig = MIG_OFF;
	card->mixed = false;
	if (!wanted) {
		pci_disable_sriov(pci);
		return 0;
	}
	error = pci_enable_sriov(pci, wanted);
	return error ? error : wanted;
}

static const struct pci_device_id known[] = {
	{ .vendor = 0x10de, .device = PCI_ANY_ID, .subvendor = PCI_ANY_ID, .subdevice = PCI_ANY_ID,
	  .class = PCI_CLASS_DISPLAY_VGA << 8, .class_mask = ~0 },
	{ .vendor = 0x10de, .device = PCI_ANY_ID, .subvendor = PCI_ANY_ID, .subdevice = PCI_ANY_ID,
	  .class = PCI_CLASS_DISPLAY_3D << 8, .class_mask = ~0 },
	{}
};
MODULE_DEVICE_TABLE(pci, known);

static struct pci_driver driver = {
	.name = "nvidia",
	.id_table = known,
	.probe = probe,
	.remove = removed,
	.sriov_configure = set_vfs,
};

/* ---- device files and /proc */

static int open_card(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);

	/* nvidiactl. */
	if (minor == 255)
		return 0;
	if (minor >= MOST || !cards[minor])
		return -ENODEV;
	file->private_data = cards[minor];
	cards[minor]->used_before = true;
	atomic_inc(&cards[minor]->users);
	return 0;
}

static int close_card(struct inode *inode, struct file *file)
{
	struct card *card = file->private_data;

	if (card) {
		atomic_dec(&card->users);
		wake_up(&closed);
	}
	return 0;
}

static const struct file_operations file_operations = {
	.owner = THIS_MODULE,
	.open = open_card,
	.release = close_card,
};

static int show_version(struct seq_file *file, void *unused)
{
	seq_puts(file, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " VERSION "  Release Build  (SIMULATED)\n");
	return 0;
}

static int __init begin(void)
{
	int error;

	if (!is("none") && !is("mdev") && !is("vendor"))
		return -EINVAL;
	error = register_chrdev(MAJOR_NUMBER, "nvidia", &file_operations);
	if (error)
		return error;
	error = mdev_register_driver(&mdev_driver);
	if (error)
		goto no_mdev;
	proc_mkdir("driver/nvidia", NULL);
	proc_mkdir("driver/nvidia/gpus", NULL);
	proc_create_single("driver/nvidia/version", 0444, NULL, show_version);
	error = pci_register_driver(&driver);
	if (error)
		goto no_pci;
	return 0;
no_pci:
	remove_proc_subtree("driver/nvidia", NULL);
	mdev_unregister_driver(&mdev_driver);
no_mdev:
	unregister_chrdev(MAJOR_NUMBER, "nvidia");
	return error;
}

static void __exit end(void)
{
	pci_unregister_driver(&driver);
	remove_proc_subtree("driver/nvidia", NULL);
	mdev_unregister_driver(&mdev_driver);
	unregister_chrdev(MAJOR_NUMBER, "nvidia");
}

module_init(begin);
module_exit(end);
MODULE_LICENSE("GPL");
MODULE_VERSION(VERSION);
MODULE_DESCRIPTION("SIMULATED driver nvidia of the kubegpu.share lab");
